"""Pods, their load and KV events"""

from __future__ import annotations

from router.observe.declared.of_requests import SECONDS
from router.observe.fast_metrics import counter, gauge, histogram

SLOW_TRANSFER = 3.0
"""Slowdown above which a transfer is slow. A fifth are over good links, whose receiver computes prompts."""
_POD_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Fewer than of models, because there are many pods."""

POD_REQUESTS = counter("warmroute_pod_requests", "Attempts, by pod and result.", "pod result")
POD_TTFT_S = histogram(
    "warmroute_pod_time_to_first_token_seconds",
    "Seconds from arrival to first token of streamed requests, by the pod that streamed it.",
    "pod",
    buckets=_POD_SECONDS,
)
POD_IN_FLIGHT = gauge("warmroute_pod_in_flight_requests", "Requests being served, by pod.", "pod")
POD_INFO = gauge(
    "warmroute_pod_info",
    "1 for each pod, with its first model, engine, version and role.",
    "pod model engine version role",
)
POD_STATE = gauge("warmroute_pod_state", "1 for the current state of a pod, else 0.", "pod state")
POD_TRUST = gauge("warmroute_pod_prefix_trust", "1 for the result of a pod's self-test, else 0.", "pod trust")
POD_MATCHING = gauge(
    "warmroute_pod_matching", "1 for how prompts are matched on a pod, else 0; off: by load only.", "pod matching"
)
POD_RUNNING = gauge("warmroute_pod_running_requests", "Running requests in the last scrape of a pod's load.", "pod")
POD_WAITING = gauge("warmroute_pod_waiting_requests", "Waiting requests in the last scrape of a pod's load.", "pod")
POD_KV_USAGE = gauge(
    "warmroute_pod_kv_usage_ratio", "Used share of the KV cache in the last scrape of a pod's load.", "pod"
)
POD_LOAD_AGE_S = gauge("warmroute_pod_load_age_seconds", "Seconds since the last scrape of a pod's load.", "pod")
POD_SLOWDOWN = gauge(
    "warmroute_pod_slowdown_ratio",
    "Learnt time of a prefill of 1,000 tokens on a pod, relative to its class.",
    "pod",
)
POD_RESTARTS = counter("warmroute_pod_restarts", "Restarts that emptied a pod's cache, by pod.", "pod")
EJECTIONS = counter("warmroute_ejections", "Ejections, by pod.", "pod")
EJECTIONS_REFUSED = counter(
    "warmroute_ejections_refused",
    "Ejections refused because too few pods would stay ready, by pod.",
    "pod",
)
KV_EVENTS = counter("warmroute_kv_events", "Applied KV events, by pod.", "pod")
KV_GAPS = counter("warmroute_kv_stream_gaps", "Times that KV events of a pod were lost for good, by pod.", "pod")
KV_STREAM_COMPLETE = gauge(
    "warmroute_kv_stream_complete", "1 while the KV event stream of a pod has no gap, else 0.", "pod"
)

DISCOVERY_AGE_S = gauge(
    "warmroute_discovery_age_seconds", "Seconds since the pods of a discovery source were last up to date.", "source"
)
RESYNC_DIFFERENCES = counter(
    "warmroute_discovery_resync_differences",
    "Changes of pods since the start that a watch had lost and a full list corrected, by source.",
    "source",
)

HANDOFFS = counter(
    "warmroute_handoffs", "Handoffs from a prefill to a decode pod, by dialect and result.", "dialect result"
)
HANDOFF_S = histogram(
    "warmroute_handoff_seconds",
    "Seconds from the prefill response (or from sending, for dialects that send both at once) to the first byte of the"
    " decode response, streamed requests.",
    "dialect",
    buckets=SECONDS,
)
TRANSFERS = gauge("warmroute_pod_transfers", "Transfers of KV to other pods in progress, by the pod that sends.", "pod")
TRANSFER_BYTES = counter("warmroute_transfer_bytes", "Bytes of KV in transfers whose time was measured.", "link")
TRANSFER_SLOWDOWN = histogram(
    "warmroute_transfer_slowdown_ratio",
    "Time of a transfer of KV without two decode steps, relative to the configured time of its link; of transfers whose"
    " configured time is above 2 ms: shorter ones measure decode steps.",
    "link",
    buckets=(0.5, 1, 1.5, 2, SLOW_TRANSFER, 5, 10, 20),
)
TRANSFER_S = histogram(
    "warmroute_transfer_seconds",
    "Seconds from the begin of a transfer of KV to the first token that needed it, where it was measured.",
    "link",
    buckets=SECONDS,
)
