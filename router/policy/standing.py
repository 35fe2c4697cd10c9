"""How does a pod stand, for any request? How long until it can start on a new prompt?

Computed when the pod, its load or its work in flight changes, not for each request: a request pays for what depends on
it. `QueueTerm` has the formula of the work ahead, `KvPressureTerm` that of the pressure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

import msgspec

from router.types import InFlight, Pod, PodId, PodLoad, PodSpeed, PodState, PodStatus, StepBegan

STEP_BUDGET_TOKENS = 8192
"""Maximum tokens that an engine computes in one step: vLLM's default on large GPUs."""
MAX_USED = 0.95
"""A fuller pod counts as this full."""
MAX_PRESSURE = MAX_USED / (1 - MAX_USED)
_MAX_KNOWN = 4096
"""Pods whose standing is kept."""


class Standing(msgspec.Struct, frozen=True, gc=False):
    """What the price of every request on one pod has in common."""

    status: PodStatus
    inflight: InFlight
    step: StepBegan
    fixed_ms: float
    """The part of the pod's next step that does not depend on the prompts in it."""
    decoding_requests: int
    """Requests that decode there by the last scrape or by our ledger, the larger of the two: a scrape lags, a ledger
    does not include other routers."""
    slowdown_ms: float
    """What the requests there add to a decode step."""
    kv_pressure: float
    """used / (1 - used) of its KV; 0 if the capacity is unknown."""
    step_began_s: float
    step_ms: float
    """Time that the current step takes in all; minus infinity if none is known to run."""
    behind_ms: float
    """Our prompts that are computed after the current step."""


_KNOWN: dict[PodId, Standing] = {}
_IDLE = InFlight()
_UNSEEN = StepBegan()


def standings(
    statuses: Iterable[PodStatus], inflight: Mapping[PodId, InFlight], steps: Mapping[PodId, StepBegan]
) -> list[Standing]:
    """How each pod stands. It is computed again only if one of the three values has been replaced."""
    found = []
    for status in statuses:
        pod_id = status.pod.id
        work, step, known = inflight.get(pod_id, _IDLE), steps.get(pod_id, _UNSEEN), _KNOWN.get(pod_id)
        if known is None or known.inflight is not work or known.step is not step or known.status is not status:
            if len(_KNOWN) >= _MAX_KNOWN:
                _KNOWN.clear()
            known = _KNOWN[pod_id] = _computed(status, work, step)
        found.append(known)
    return found


def idle_standing(pod: Pod) -> Standing:
    """How the pod would stand without any work."""
    return _computed(PodStatus(pod, PodState.READY), _IDLE, _UNSEEN)


def _computed(status: PodStatus, work: InFlight, step: StepBegan) -> Standing:
    pod, load = status.pod, status.load
    speed, our_decodes = pod.speed, work.requests - work.prefill_requests
    fixed_ms = speed.fixed_ms(our_decodes, work.decode_tokens) if our_decodes else speed.c0_ms
    decoding = our_decodes if our_decodes > load.running else load.running
    began_s, step_ms, behind_ms = _work_ahead(work, step, speed, fixed_ms)
    return Standing(
        status=status,
        inflight=work,
        step=step,
        fixed_ms=fixed_ms,
        decoding_requests=decoding,
        slowdown_ms=speed.d1_ms_per_request * decoding + speed.d2_ms_per_context_token * work.context_tokens,
        kv_pressure=_kv_pressure(load, work, pod.capacity_tokens) if pod.capacity_tokens else 0.0,
        step_began_s=began_s,
        step_ms=step_ms,
        behind_ms=behind_ms,
    )


def _kv_pressure(load: PodLoad, work: InFlight, capacity_tokens: int) -> float:
    used, at_engine = load.kv_usage, load.running + load.waiting
    if at_engine and at_engine < work.requests:
        used *= work.requests / at_engine
    used += work.prefill_tokens / capacity_tokens
    return used / (1 - used) if used < MAX_USED else MAX_PRESSURE


def _work_ahead(work: InFlight, step: StepBegan, speed: PodSpeed, fixed_ms: float) -> tuple[float, float, float]:
    """When the current step began, what it takes, and the prompts behind it. Half of a step whose begin was not
    observed counts as over."""
    current = current_step(work, step, speed)
    if current is None:
        return 0.0, -inf, work.prefill_ms
    began_s, inside_ms = current
    step_ms = fixed_ms + inside_ms
    if began_s == -inf:
        return 0.0, -inf, step_ms / 2 + work.prefill_ms - inside_ms
    return began_s, step_ms, work.prefill_ms - inside_ms


def current_step(work: InFlight, step: StepBegan, speed: PodSpeed) -> tuple[float, float] | None:
    """When the current step began, and the milliseconds of our prompts in it; None if nothing of ours is running.

    Minus infinity if its begin was not observed. A step with prompts of other routers only is not visible here."""
    decodes, began_s = work.requests > work.prefill_requests, step.at_s
    if not work.head_ms:
        return (began_s, 0.0) if decodes else None
    if not decodes or began_s == -inf:
        return work.head_since_s, work.head_ms
    if began_s < work.head_since_s:
        return began_s, 0.0
    return began_s, min(step.prefill_ms, work.prefill_ms, _max_in_step_ms(work, speed))


def _max_in_step_ms(work: InFlight, speed: PodSpeed) -> float:
    """The first prompt, or what fits into one step: the other prompts may have to wait for KV space."""
    return max(work.head_ms, STEP_BUDGET_TOKENS * speed.c1_ms_per_token)
