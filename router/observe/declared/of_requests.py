"""Requests and their prompts"""

from __future__ import annotations

from router.observe.declared.declaration import Join, counter, gauge, histogram

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_PHASE_SECONDS = (0.00002, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0, 10.0, 60.0)

REQUESTS = counter("warmroute_requests", "Requests that ended, by endpoint, model and result.", "endpoint model result")
IN_FLIGHT = gauge("warmroute_in_flight_requests", "Requests being served.", join=Join.SUM)
TTFT_S = histogram(
    "warmroute_time_to_first_token_seconds",
    "Seconds from arrival to first token of streamed requests.",
    "model",
    buckets=SECONDS,
)
DURATION_S = histogram(
    "warmroute_request_duration_seconds", "Seconds from arrival to end of requests.", "model", buckets=SECONDS
)
PHASE_S = histogram("warmroute_phase_seconds", "Seconds of requests in each phase.", "phase", buckets=_PHASE_SECONDS)
RETRIES = counter("warmroute_retries", "Attempts after a failure, by reason.", "reason")
RETRIES_REFUSED = counter(
    "warmroute_retries_refused", "Failures that were not retried for lack of retry budget, by reason.", "reason"
)

PROMPT_TOKENS = counter("warmroute_prompt_tokens", "Prompt tokens of served requests.", "model")
CACHED_PREDICTED = counter(
    "warmroute_cached_tokens_predicted", "Prompt tokens predicted to be in the chosen pod's cache.", "model"
)
CACHED_ACTUAL = counter("warmroute_cached_tokens_actual", "Cached prompt tokens as reported by engines.", "model")
CACHED_ERROR = histogram(
    "warmroute_cached_tokens_error",
    "Absolute difference between predicted and reported cached tokens of a request, in tokens.",
    "model",
    buckets=(0, 16, 64, 256, 1024, 4096, 16384),
)
UNREAD_PROMPTS = counter(
    "warmroute_unread_prompts", "Requests routed without prefix matching, by reason.", "model reason"
)
INCREMENTAL_MISMATCHES = counter(
    "warmroute_incremental_prompt_mismatches",
    "Incrementally read prompts that differed from the whole prompt; the first disables it for the model.",
    "model",
)
PROMPT_CACHE_BYTES = gauge("warmroute_prompt_cache_bytes", "Estimated bytes of prompt caches.", "model", Join.SUM)

CLASS_REQUESTS = counter(
    "warmroute_class_requests",
    "Requests by workload class, tenant (the busiest, and `other`) and result.",
    "class tenant result",
)
CLASS_TTFT_S = histogram(
    "warmroute_class_time_to_first_token_seconds",
    "Seconds from arrival to first token of streamed requests, by workload class and policy.",
    "class policy",
    buckets=SECONDS,
)
CLASS_PROMPT_TOKENS = counter(
    "warmroute_class_prompt_tokens", "Prompt tokens of requests whose engine reported cached tokens.", "class policy"
)
CLASS_CACHED_TOKENS = counter(
    "warmroute_class_cached_tokens", "Cached prompt tokens as reported by engines.", "class policy"
)
SLO_REQUESTS = counter(
    "warmroute_policy_slo_requests",
    "Streamed requests of policies with slo.ttft_ms, by whether the first token met it.",
    "policy met",
)
