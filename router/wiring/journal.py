"""Where do decisions and receipts go?

Builds the journal with what it writes to: a file, a stream of the cluster's Redis, a shadow policy. This file decides
nothing about requests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from router.config.receipts import Receipts
from router.errors import ConfigError
from router.observe.journal import Journal
from router.observe.metrics import Metrics
from router.observe.receipt_lines import ReceiptLog, ReceiptWriter, Sink
from router.observe.shadow import Shadow
from router.wiring.cluster import Cluster


class Records:
    """The journal and what runs and is closed with it. Raises `ConfigError` where the file cannot be written."""

    def __init__(self, config: Receipts, shadow: Shadow | None, metrics: Metrics, cluster: Cluster | None) -> None:
        self.feeds: dict[str, Callable[[], Awaitable[None]]] = {}
        self._log = _open_log(config.file)
        sinks: list[Sink] = [self._log.write] if self._log else []
        if config.redis_maxlen and cluster:
            stream = cluster.receipts(config.redis_maxlen, metrics.receipts_lost.inc)
            sinks.append(stream.write)
            self.feeds["receipts"] = stream.run
        writer = ReceiptWriter(sinks, scenes=config.scenes) if sinks else None
        self.journal = Journal(size=config.keep, prompts=config.prompts, writer=writer, shadow=shadow)

    def close(self) -> None:
        """Everything that was written is on the disk."""
        if self._log:
            self._log.close()


def _open_log(path: str | None) -> ReceiptLog | None:
    try:
        return ReceiptLog(path) if path else None
    except OSError as error:
        raise ConfigError(f"receipts: {error}") from error
