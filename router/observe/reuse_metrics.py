"""After how long are prefixes used again?"""

from __future__ import annotations

from collections import OrderedDict

from prometheus_client import CollectorRegistry

from router.observe.declared import of_requests
from router.observe.fast_metrics import Histogram
from router.types import BlockHash

MAX_PREFIXES = 32_768
"""The latest prefixes, whose next use is recognised: about 5 MB."""


class ReuseMetrics:
    """Intervals between two uses of a prefix."""

    def __init__(self, r: CollectorRegistry) -> None:
        self._interval_s = Histogram(r, of_requests.REUSE_INTERVAL_S)
        self._used_s: OrderedDict[BlockHash, float] = OrderedDict()
        """Oldest use first. Finding the first key of a `dict` takes 6 us after many removals."""

    def add(self, model: str, key: BlockHash, now_s: float) -> None:
        """Add a use of the prefix whose last block is `key`; 0 for a prompt without blocks."""
        if not key:
            return
        used_s = self._used_s.pop(key, None)
        self._used_s[key] = now_s
        if used_s is not None:
            self._interval_s.labels(model).observe(now_s - used_s)
        elif len(self._used_s) > MAX_PREFIXES:
            self._used_s.popitem(last=False)
