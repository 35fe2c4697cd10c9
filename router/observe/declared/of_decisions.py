"""Decisions: predictions, calibration and policies"""

from __future__ import annotations

from router.observe.declared.of_requests import SECONDS
from router.observe.fast_metrics import counter, gauge, histogram

DECISIONS = counter(
    "warmroute_decisions",
    "Served requests by kind of plan, and by whether the pod held the longest prefix (prefix), one that held more was"
    " more expensive (price), or none held any (cold).",
    "policy plan reason",
)
TTFT_PREDICTED_S = histogram(
    "warmroute_time_to_first_token_predicted_seconds",
    "Expected seconds to first token of streamed requests.",
    "model",
    buckets=SECONDS,
)
TTFT_ERROR = histogram(
    "warmroute_time_to_first_token_error_ratio",
    "Absolute difference between expected and actual time to first token, relative to the actual.",
    "model",
    buckets=(0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
)
REGRET_S = histogram(
    "warmroute_regret_seconds",
    "Seconds by which the best other candidate was expected to be faster than the chosen one was, sampled.",
    "model",
    buckets=(0, *SECONDS),
)
COEFFICIENT = gauge(
    "warmroute_calibration_coefficient",
    "Calibrated coefficients of a class of pods, of one pod (label pod) or of a kind of links.",
    "subject pod coefficient",
)
CONFIDENCE = gauge(
    "warmroute_calibration_confidence",
    "Confidence of a calibration: 0 for the prior alone, up to 1.",
    "subject pod",
)
CALIBRATION_ERROR = gauge(
    "warmroute_calibration_error_ratio",
    "Mean absolute relative error of recent times, by the prior and by the calibration.",
    "subject pod by",
)
EVICTED_SOON_TOKENS = counter(
    "warmroute_evicted_soon_tokens",
    "Estimated prompt tokens that no pod held because they were evicted within the last minute.",
    "model",
)
EVICTED_SOON_S = counter(
    "warmroute_evicted_soon_recompute_seconds",
    "Estimated seconds of prefill of these tokens, by the learnt speed of the model's pods.",
    "model",
)
EVICTED_REUSE = gauge(
    "warmroute_evicted_reuse_ratio",
    "Learnt number of requests that would have used an evicted block, which prices evictions.",
    "model",
)

PLACED_PROMPT_TOKENS = counter(
    "warmroute_placed_prompt_tokens",
    "Prompt tokens of the requests that shadow caches follow.",
    "model placement",
)
PLACED_CACHED_TOKENS = counter(
    "warmroute_placed_cached_tokens",
    "Those of them that caches had, and would have had under another placement, by shadow caches.",
    "model placement",
)
PLACED_ERROR = gauge(
    "warmroute_placed_error_ratio",
    "Cached share by shadow caches of the chosen placement minus the real one, of the latest requests. Beyond 0.03"
    " either way, as after a restart, other placements count as equally good.",
    "model",
)
PREFILL_SAVED_S = counter(
    "warmroute_prefill_saved_seconds",
    "Seconds of prefill that cached prefixes saved, by calibrated coefficients; of other placements with the caches"
    " that these would have had.",
    "model placement",
)
PREFILL_SAVED_GPU_S = counter(
    "warmroute_prefill_saved_gpu_seconds",
    "The same, of the GPUs of each pod: seconds of GPUs.",
    "model placement",
)

POLICY_INFO = gauge("warmroute_policy_info", "1 for each active policy.", "policy version set_version")
POLICY_RELOADS = counter("warmroute_policy_reloads", "Policy reloads, by result.", "result")
POLICY_RELOAD_FAILED = gauge(
    "warmroute_policy_reload_failed", "1 while the policy files are invalid and the last valid set is used."
)
POLICY_RELOAD_TTFT = gauge(
    "warmroute_policy_reload_ttft_ratio",
    "Mean expected time to first token of recent decisions by the policies of the last reload, relative to those before"
    " it, with the caches as they were: later requests find others. 1 if nothing changed.",
)
