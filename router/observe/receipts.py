"""What was decided about a request, why, and how did the request end?

`RecordedDecision` is a decision in memory; it only holds references, which is cheap. A `Receipt` has the same facts as
numbers, computed when it is requested or written: lengths, block hashes, prices and times. It has the prompt only if
`receipts.prompts` is on, and never a response. This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec

from router.decision import Candidate, RouteDecision
from router.policy.decide import expected_ttft_ms
from router.policy.explain import Column, Explanation, PricedPlan, explain, priced
from router.policy.price import choice_of
from router.policy.recording import FleetLine, RecordedScene, SceneLine
from router.policy.spec import Policy
from router.types import PromptPrefix

RECEIPT_BLOCK_TOKENS = 32
"""Receipts have one chain hash for this number of tokens, which covers the whole prefix. A simulation finds hits only
as exactly; earlier versions wrote one for 128, and lost several percent of short prompts."""
CLIENT_GONE = "client_gone"
"""The result of a request whose client disconnected. Other results: "ok", "pod_refused" and "pod_error" for a pod's
own 4xx and 5xx responses, and the codes of the router's errors."""
MAX_CANDIDATES = 4
"""Maximum number recorded for each decision, at about 1 KiB each; the candidate that served is added."""


class Failure(msgspec.Struct, frozen=True):
    """A failed attempt: pod, code of the error, message."""

    pod: str
    error: str
    message: str = ""


class Outcome(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How a request ended. `at_s` is the Unix time of its arrival; `served` is the candidate that was tried last."""

    id: str
    at_s: float
    model: str
    endpoint: str
    result: str
    trace_id: str = ""
    is_trace_recorded: bool = False
    prompt_tokens: int = 0
    output_tokens: int | None = None
    cached_tokens: int | None = None
    ttft_ms: float | None = None
    ttft_limit_ms: float | None = None
    e2e_ms: float = 0.0
    served: Candidate | None = None
    failures: tuple[Failure, ...] = ()
    continued: tuple[str, ...] = ()
    phases_s: Mapping[str, float] = {}


class RecordedDecision(msgspec.Struct, kw_only=True, gc=False):
    """One decision, made at the Unix time `at_s`; `outcome` is set when its request has ended."""

    at_s: float
    scene: RecordedScene
    policy: Policy
    candidates: tuple[Candidate, ...]
    candidate_count: int
    reason: str
    prompt: Mapping[str, Any] | None = None
    """Only with `receipts.prompts`, until the request has ended."""
    excerpt: str = ""
    """The beginning of that prompt, when the request has ended."""
    outcome: Outcome | None = None

    @property
    def shown(self) -> tuple[Candidate, ...]:
        """The best candidates, and the one that served."""
        served = self.outcome.served if self.outcome else None
        return self.candidates if served is None or served in self.candidates else (*self.candidates, served)


class Receipt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="receipt"):
    """One request that arrived at the Unix time `at_s`. `blocks` are chain hashes, one for every `block_size_tokens` of
    the prompt. Fields without a value are omitted; a request without a result is still being served."""

    at_s: float
    model: str
    endpoint: str
    result: str = ""
    id: str = ""
    trace_id: str = ""
    """With `tracing.enabled`."""
    pod: str = ""
    prefill_pod: str = ""
    """The pod that computed the prompt, if it is not `pod`."""
    tenant: str = ""
    workload: str = ""
    """Workload class."""
    stream: bool = False
    policy: str = ""
    policy_version: str = ""
    reason: str = ""
    prompt_tokens: int = 0
    output_tokens: int | None = None
    block_size_tokens: int = 0
    blocks: list[int] = []
    predicted_ms: float | None = None
    predicted_cached_tokens: int | None = None
    cached_tokens: int | None = None
    ttft_ms: float | None = None
    e2e_ms: float = 0.0
    candidates: tuple[PricedPlan, ...] = ()
    """The best of `candidate_count`, best first."""
    candidate_count: int = 0
    failures: tuple[Failure, ...] = ()
    continued: tuple[str, ...] = ()
    """How each later pod continued its broken stream."""
    phases_ms: dict[str, float] = {}
    scene_digest: str = ""
    scene: SceneLine | None = None
    prompt: Any = None


_OF_OUTCOME = set(Outcome.__struct_fields__).intersection(Receipt.__struct_fields__)

Line: TypeAlias = Receipt | FleetLine
"""A line of a receipts file."""


def record_decision(
    scene: RecordedScene, decision: RouteDecision, policy: Policy, at_s: float, prompt: Any = None
) -> RecordedDecision:
    return RecordedDecision(
        at_s=at_s,
        scene=scene,
        policy=policy,
        candidates=decision.candidates[:MAX_CANDIDATES],
        candidate_count=len(decision.candidates),
        reason=decision.reason,
        prompt=prompt,
    )


def receipt(outcome: Outcome, *, prompt: PromptPrefix | None = None) -> Receipt:
    """The outcome in numbers. `prompt` adds its block hashes."""
    block_size_tokens, blocks = receipt_blocks(prompt) if prompt else (0, [])
    served = outcome.served
    choice = choice_of(served.plan) if served else None
    return Receipt(
        **{name: getattr(outcome, name) for name in _OF_OUTCOME},
        pod=choice.pod if choice else "",
        prefill_pod=choice.prefill_pod if choice else "",
        block_size_tokens=block_size_tokens,
        blocks=blocks,
        predicted_ms=expected_ttft_ms(served.cost) if served else None,
        predicted_cached_tokens=served.cached_tokens if served else None,
        phases_ms={phase: taken_s * 1000 for phase, taken_s in outcome.phases_s.items()},
    )


def decision_receipt(kept: RecordedDecision, *, prompt: PromptPrefix | None = None) -> Receipt:
    """The receipt of a decision, with its outcome if there is one, without its scene."""
    facts = kept.scene
    known = kept.outcome or Outcome(
        id=facts.request_id,
        at_s=kept.at_s,
        model=facts.model,
        endpoint=facts.endpoint.value,
        result="",
        prompt_tokens=facts.prompt_tokens or 0,
    )
    return msgspec.structs.replace(
        receipt(known, prompt=prompt),
        tenant=facts.tenant,
        workload=facts.workload,
        stream=facts.stream,
        policy=kept.policy.name,
        policy_version=kept.policy.version,
        reason=kept.reason,
        candidates=tuple(priced(candidate) for candidate in kept.shown),
        candidate_count=kept.candidate_count,
        prompt=kept.prompt,
    )


class Explained(msgspec.Struct, frozen=True):
    explanation: Explanation
    receipt: Receipt


def explained(kept: RecordedDecision) -> Explained:
    """The response of `/admin/explain`."""
    found = decision_receipt(kept)
    return Explained(
        explain(kept.scene.scene(), kept.policy, found.candidates, kept.candidate_count, kept.reason), found
    )


def explained_later(found: Receipt, scene: RecordedScene | None, policy: Policy | None) -> Explained:
    """The same for a line of a file. Without its scene, or that version of its policy, it has the recorded prices
    alone, and names what is missing."""
    plans, version = found.candidates, found.policy_version
    if scene and policy and policy.version == version:
        return Explained(explain(scene.scene(), policy, plans, found.candidate_count, found.reason), found)
    missing = f"version {version} of the policy in --policies" if scene else "receipts.replay_data"
    columns = tuple(Column(plan, ()) for plan in plans)
    why = (
        f"{plans[0].choice}, by {found.reason}. Inputs and formulas need {missing}." if plans else "No pod was chosen."
    )
    return Explained(
        Explanation(
            found.id, found.model, found.policy, version, found.reason, why, found.candidate_count, (), (), columns
        ),
        found,
    )


def receipt_blocks(prompt: PromptPrefix) -> tuple[int, list[int]]:
    """Block size and chain hashes of a receipt: a subset of the prompt's."""
    stride = max(RECEIPT_BLOCK_TOKENS // prompt.block_size_tokens, 1)
    return stride * prompt.block_size_tokens, [int(block) for block in prompt.hashes[stride - 1 :: stride]]
