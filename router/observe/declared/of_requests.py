"""Requests and their prompts"""

from __future__ import annotations

from router.observe.fast_metrics import counter, gauge, histogram

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_SECONDS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_PHASE_SECONDS = (0.00002, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.25, 1.0, 10.0, 60.0)

REQUESTS = counter("warmroute_requests", "Requests that ended, by endpoint, model and result.", "endpoint model result")
NAMED_REQUESTS = counter(
    "warmroute_named_requests",
    "Requests that ended and asked for a name of `names`, by what it became and result.",
    "name model result",
)
FALLBACKS = counter(
    "warmroute_fallbacks",
    "Requests that a fallback of their name served, or was to serve, by its model and why.",
    "name model reason",
)
PROVIDER_MONEY = counter(
    "warmroute_provider_money", "Money that providers took, by their price and the usage they reported.", "provider"
)
PROVIDER_REFUSALS = counter(
    "warmroute_provider_refusals",
    "Requests that no pod served and a provider was not asked for, by why.",
    "provider reason",
)
IN_FLIGHT = gauge("warmroute_in_flight_requests", "Requests being served.")
WAITING_FOR_PODS = gauge(
    "warmroute_requests_waiting_for_pods", "Requests that wait for the first pod of their model.", "model"
)
QUEUED = gauge("warmroute_queue_requests", "Requests that wait in front of the fleet.")
QUEUE_S = histogram(
    "warmroute_queue_seconds", "Seconds that requests waited in front of the fleet.", "model", buckets=SECONDS
)
QUEUE_REFUSED = counter(
    "warmroute_queue_refused", "Requests refused because their answers would be late, by reason.", "model reason"
)
QUEUE_ERROR = gauge(
    "warmroute_queue_error_ratio",
    "Learnt share by which first tokens may come later than predicted, before a request is refused.",
    "model",
)
QUEUE_REST_S = gauge(
    "warmroute_queue_rest_seconds", "Learnt time between two prompts of a pod, for decoding alone.", "model"
)
TTFT_S = histogram(
    "warmroute_time_to_first_token_seconds",
    "Seconds from arrival to first token of streamed requests.",
    "model class policy",
    buckets=SECONDS,
    exemplars=True,
)
TPOT_S = histogram(
    "warmroute_time_per_output_token_seconds",
    "Mean seconds per output token after the first of streamed requests whose engine reported output tokens.",
    "model class",
    buckets=_TOKEN_SECONDS,
    exemplars=True,
)
INTER_TOKEN_S = histogram(
    "warmroute_inter_token_seconds",
    "Seconds between two pieces of streamed responses, of every sixteenth stream.",
    "model class",
    buckets=_TOKEN_SECONDS,
)
DURATION_S = histogram(
    "warmroute_request_duration_seconds",
    "Seconds from arrival to end of requests.",
    "model class",
    buckets=SECONDS,
    exemplars=True,
)
CANCELLATIONS = counter(
    "warmroute_cancellations", "Requests whose client disconnected, by the phase in which it did.", "phase"
)
PHASE_S = histogram("warmroute_phase_seconds", "Seconds of requests in each phase.", "phase", buckets=_PHASE_SECONDS)
RETRIES = counter("warmroute_retries", "Attempts after a failure, by reason.", "reason")
RETRIES_REFUSED = counter(
    "warmroute_retries_refused", "Failures that were not retried for lack of retry budget, by reason.", "reason"
)
CONTINUATIONS = counter(
    "warmroute_continuations",
    "Broken streams by how another pod continued them, why they broke, and whether the streams were joined.",
    "method cause outcome",
)

PROMPT_TOKENS = counter("warmroute_prompt_tokens", "Prompt tokens of served requests.", "model class policy")
REPORTED_PROMPT_TOKENS = counter(
    "warmroute_reported_prompt_tokens",
    "Prompt tokens of served requests whose engine reported cached tokens.",
    "model class policy",
)
AVAILABLE_TOKENS = counter(
    "warmroute_cached_tokens_available",
    "Prompt tokens that the pod with the longest prefix held when the request was decided.",
    "model class policy tier",
)
CAPTURED_TOKENS = counter(
    "warmroute_cached_tokens_captured",
    "Prompt tokens predicted to be in the cache of the chosen pod.",
    "model class policy tier",
)
SPLIT_TOKENS = counter(
    "warmroute_split_prompt_tokens",
    "Prompt tokens of splits that their prefill pods computed, and those of them that a decode pod held: `again`.",
    "model dialect tokens",
)
DELIVERED_TOKENS = counter(
    "warmroute_cached_tokens_delivered", "Cached prompt tokens as reported by engines.", "model class policy"
)
TENANT_TOKENS = counter(
    "warmroute_tenant_prompt_tokens",
    "Prompt tokens of served requests by tenant: all, available, captured and delivered.",
    "tenant stage",
)
TENANT_IN_FLIGHT_TOKENS = gauge(
    "warmroute_tenant_in_flight_prompt_tokens",
    "Prompt tokens of requests being served, by tenant, of the latest 1,000 decisions.",
    "tenant",
)
CACHED_ERROR = histogram(
    "warmroute_cached_tokens_error",
    "Absolute difference between predicted and reported cached tokens of a request, in tokens.",
    "model",
    buckets=(0, 16, 64, 256, 1024, 4096, 16384),
)
PREFIX_DEPTH = histogram(
    "warmroute_prefix_depth_tokens",
    "Leading prompt tokens of a request that some pod held, in tokens.",
    "model",
    buckets=(0, 64, 256, 1024, 4096, 16384, 65536),
)
REUSE_INTERVAL_S = histogram(
    "warmroute_prefix_reuse_interval_seconds",
    "Seconds between two served requests with the same affinity key, among the latest 32,768 keys.",
    "model",
    buckets=(1, 5, 15, 60, 300, 900, 3600, 14400),
)
UNREAD_PROMPTS = counter(
    "warmroute_unread_prompts", "Requests routed without prefix matching, by reason.", "model reason"
)
INCREMENTAL_MISMATCHES = counter(
    "warmroute_incremental_prompt_mismatches",
    "Incrementally read prompts that differed from the whole prompt; the first disables it for the model.",
    "model",
)
PROMPTS_COMPARED = counter(
    "warmroute_prompts_compared",
    "Sampled chats whose prompt tokens were compared with the pod's count, by rule that concerns them and result.",
    "model rule result",
)
PROMPT_CACHE_BYTES = gauge("warmroute_prompt_cache_bytes", "Estimated bytes of prompt caches.", "model")

CLASS_REQUESTS = counter(
    "warmroute_class_requests",
    "Requests by workload class, tenant (the busiest, and `other`) and result.",
    "class tenant result",
)
USAGE_TOKENS = counter(
    "warmroute_usage_tokens",
    "Tokens of requests that ended in any way, by tenant (the busiest, and `other`); with `tenants` or `usage.file`.",
    "tenant model kind",
)
QUOTA_REFUSALS = counter(
    "warmroute_quota_refusals",
    "Requests refused because of a quota, by tenant (the busiest, and `other`) and limit.",
    "tenant limit",
)
SLO_REQUESTS = counter(
    "warmroute_slo_requests",
    "Streamed requests of models and tenants with an SLO, by whether the first token met it.",
    "model policy met",
)
