"""All metrics of a publisher, on one registry."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from router.observe.declared import of_pods, of_publisher
from router.observe.fast_metrics import Counter, Gauge
from router.observe.kv_stream_metrics import KvStreamMetrics
from router.observe.metrics import KNOWN_STATES
from router.observe.process_metrics import add_process_metrics
from router.publisher.published_holder import PublishState
from router.publisher.publisher import Publisher
from router.types import FleetSnapshot


class PublisherMetrics:
    """The registry and its metrics. Those of holders are read when they are rendered."""

    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        add_process_metrics(r)
        self.kv = KvStreamMetrics(r)
        self._pod_state = Gauge(r, of_pods.POD_STATE)
        self._state = Gauge(r, of_publisher.PUBLISHER_STATE)
        self._complete = Gauge(r, of_publisher.PUBLISHER_COMPLETE)
        self._pending = Gauge(r, of_publisher.PUBLISHER_PENDING)
        self._written = Counter(r, of_publisher.PUBLISHER_WRITTEN)
        self._reloads = Counter(r, of_publisher.PUBLISHER_RELOADS)
        self._orphans = Counter(r, of_publisher.PUBLISHER_ORPHANS)

    def render(self, publisher: Publisher, fleet: FleetSnapshot) -> bytes:
        pods = {status.pod.id: status for status in fleet.pods}
        self.kv.keep(pods)
        self._pod_state.replace_states({(pod,): status.state for pod, status in pods.items()}, KNOWN_STATES)
        holders = {(holder.generation.model, holder.id): holder for holder in publisher.holders}
        self._state.replace_states({labels: holder.state for labels, holder in holders.items()}, PublishState)
        self._complete.replace({labels: holder.complete for labels, holder in holders.items()})
        self._pending.replace({labels: holder.pending_blocks for labels, holder in holders.items()})
        self._written.replace({labels: holder.written_blocks for labels, holder in holders.items()})
        self._reloads.replace({labels: holder.reloads for labels, holder in holders.items()})
        self._orphans.replace({labels: holder.blocks.orphans for labels, holder in holders.items()})
        return generate_latest(self.registry)
