"""Builds what enforces the quotas of tenants, and connects it with the other processes that enforce them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from router.admission.quotas import Quotas
from router.admission.sharing import MeterSharing
from router.config.schema import RouterConfig
from router.feeds.supervise import Feeds

if TYPE_CHECKING:
    from router.wiring.cluster_member import ClusterMember


class QuotaParts:
    """The quotas of one router, which shares them with the others through Redis."""

    def __init__(self, config: RouterConfig, cluster: ClusterMember | None) -> None:
        self.feeds: Feeds = {}
        self.quotas = Quotas()
        self.next_exchange: Callable[[], Awaitable[None]] | None = None
        """Waits until shares have been exchanged with the other processes; None where this one is alone."""
        if config.tenants is None or cluster is None:
            return
        from router.feeds.quota_feed import QuotaFeed  # imports redis: 6 MiB

        sharing = MeterSharing()
        feed = QuotaFeed(sharing, cluster.quota_book.exchange, cluster.quota_book.leave, cluster.nodes)
        self.quotas, self.next_exchange = Quotas(sharing), feed.next_exchange
        self.feeds = {"quotas": feed.run}
