"""Thresholds of the operators' page and of the chart's alerts on the same facts.

Those of the page are the same or lower, because who looks at it wants to know sooner. Its share of slow transfers is
higher, because it judges fewer of them.
"""

from __future__ import annotations

from router import errors

SHOWN_SLOWDOWN, ALERT_SLOWDOWN = 1.5, 2
"""Time of a pod's prefills relative to its class."""
SHOWN_INDEX_AGE_S, ALERT_INDEX_AGE_S = 5, 15
WORSE_TTFT_RATIO = 1.2
"""Mean expected time to first token by new policies relative to the old ones."""
TENANT_SHARE, ONLY_TENANT_SHARE = 0.7, 0.99
"""Share of the prompt tokens being served. A tenant above the second is the only one."""
SHOWN_TRANSFERS, ALERT_TRANSFERS = 6, 10
"""Transfers over a link that are needed for a judgement."""
SHOWN_SLOW_SHARE, ALERT_SLOW_SHARE = 0.85, 0.7
"""Share of them that must be slow (`SLOW_TRANSFER`)."""
UNREAD_SHARE = 0.05
"""Share of requests that are routed by load only."""
MEANT = {errors.Overloaded.code}
"""Refusals on purpose: requests that would be late, by `admission`."""
_KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.RouterError)]
FAILED = frozenset({*(kind.code for kind in _KINDS if kind.http_status >= 500), "pod_error"} - MEANT)
"""The results of requests that a client could expect to succeed."""
SHOWN_FAILED_SHARE, ALERT_FAILED_SHARE, SHOWN_FAILURES = 0.01, 0.05, 3
"""Share of the requests that fail, and how many are needed for a notice."""
