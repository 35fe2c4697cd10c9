"""How do the holders of stores and of anybody else's tiers come into a publisher?

Sources speak of holders by name; this says which model each belongs to and who may read it. Standardised events may be
sent again and may be lost on the way: what was known already is passed over, what is missing is told. This file decodes
no format and reads no socket.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from router.index.holders import HolderFacts
from router.publisher.publisher import Publisher
from router.publisher.standard_events import MalformedEvent, StandardEvent
from router.types import BlocksCleared, KvEvent


@dataclass(frozen=True, slots=True)
class StoreSink:
    """Holders of one source: a `TierSink` that publishes them. `facts_of` says who a holder is, by its name."""

    publisher: Publisher
    model: str
    facts_of: Callable[[str], HolderFacts]

    def restarted(self, holder: str) -> None:
        """A holder that is new, or has lost all it had."""
        self.publisher.begin(holder, self.publisher.generations[self.model], self.facts_of(holder))

    def apply(self, holder: str, events: tuple[KvEvent, ...]) -> None:
        """What it told, in order."""
        self._open(holder)
        self.publisher.apply(holder, events)

    def stream_state(self, holder: str, *, complete: bool) -> None:
        """Whether all it told has come."""
        self._open(holder)
        self.publisher.caught_up(holder, complete=complete)

    def gone(self, holder: str) -> None:
        """It is no longer there."""
        self.publisher.end(holder)

    def _open(self, holder: str) -> None:
        if not self.publisher.publishes(holder):
            self.restarted(holder)


class StandardIntake:
    """Standardised events of the configured backends, in whatever order they come."""

    def __init__(self) -> None:
        self._sinks: dict[str, StoreSink] = {}
        self._last_id: dict[str, int] = {}

    def add(self, backend: str, sink: StoreSink) -> None:
        """Events of this backend are the sink's."""
        self._sinks[backend] = sink

    def take(self, event: StandardEvent) -> bool:
        """Publish one event; False if it was known. Raises `MalformedEvent` for a backend that is not configured."""
        sink = self._sinks.get(event.backend)
        if sink is None:
            known = ", ".join(sorted(self._sinks)) or "none"
            raise MalformedEvent("backend_id", f"{event.backend!r} is not under publish.stores; known: {known}")
        if event.model and event.model != sink.model:
            raise MalformedEvent("model_name", f"{event.model!r} is not the model of this backend, {sink.model!r}")
        last = self._last_id.get(event.holder)
        if last is not None and event.event_id <= last:
            return False
        self._last_id[event.holder] = event.event_id
        if last is None:
            sink.stream_state(event.holder, complete=True)
        elif event.event_id > last + 1:
            sink.stream_state(event.holder, complete=False)
        if isinstance(event.event, BlocksCleared):
            sink.restarted(event.holder)
            sink.stream_state(event.holder, complete=True)
        else:
            sink.apply(event.holder, (event.event,))
        return True
