"""What each request used, for bills and for quotas: one line when it ends, in any way.

Lines of a process are numbered without gaps, so that a reader knows each line by its id and notices missing ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

import msgspec
from prometheus_client import CollectorRegistry

from router.observe.declared import of_requests
from router.observe.ended import EndedRequest, UsedTokens
from router.observe.fast_metrics import MAX_SERIES, Count, Counter

_encode = msgspec.json.Encoder().encode
_KINDS = ("prompt", "cached", "computed", "output")


class UsageMetrics:
    def __init__(self, r: CollectorRegistry) -> None:
        self._tokens = Counter(r, of_requests.USAGE_TOKENS)
        self._series: dict[tuple[str, str], tuple[Count, ...]] = {}

    def add(self, tenant: str, used: UsedTokens) -> None:
        """Add one request. `tenant`: the label."""
        prompt, cached, computed, output = self._series.get((tenant, used.model)) or self._new(tenant, used.model)
        prompt.value += used.prompt_tokens
        cached.value += used.cached_tokens
        computed.value += used.computed_tokens
        output.value += used.output_tokens

    def remove_tenants(self, tenants: list[str]) -> None:
        self._tokens.remove_where(lambda labels: labels[0] in tenants)
        self._series = {key: series for key, series in self._series.items() if key[0] not in tenants}

    def _new(self, tenant: str, model: str) -> tuple[Count, ...]:
        if len(self._series) >= MAX_SERIES:
            self._series.clear()
        found = self._series[tenant, model] = tuple(self._tokens.labels(tenant, model, kind) for kind in _KINDS)
        return found


@dataclass(slots=True, eq=False)
class UsageWriter:
    """Numbers the lines of this process, and passes them on as JSON. `process`: a name that no other ever has."""

    process: str
    sink: Callable[[bytes], None]
    close: Callable[[], None] = lambda: None
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def ended(self, ended: EndedRequest) -> None:
        if ended.used is not None:
            ended.used.id = f"{self.process}-{next(self._numbers)}"
            self.sink(_encode(ended.used))
