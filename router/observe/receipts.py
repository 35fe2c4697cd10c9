"""What was decided about a request, why, and how did the request end?

A `Receipt` has the facts of a decision and of its ended request as numbers, computed when it is requested or written:
lengths, block hashes, prices and times. It has the prompt only if `receipts.prompts` is on, and never a response. This
module does no I/O.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from router.decision import Candidate
from router.observe.ended import Ended, Failure, RecordedDecision
from router.policy.decide import expected_ttft_ms
from router.policy.explain import Column, Explanation, PricedPlan, explain, priced
from router.policy.price import choice_of
from router.policy.recording import FleetLine, RecordedScene, SceneLine
from router.policy.spec import Policy
from router.types import PromptPrefix

RECEIPT_BLOCK_TOKENS = 32
"""Receipts have one chain hash for this number of tokens, which covers the whole prefix. A simulation finds hits only
as exactly; earlier versions wrote one for 128, and lost several percent of short prompts."""


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


_OF_ENDED = set(Ended.__struct_fields__).intersection(Receipt.__struct_fields__) - {"tenant", "workload", "policy"}
"""The fields of both that also a request without a decision has in its receipt."""

Line: TypeAlias = Receipt | FleetLine
"""A line of a receipts file."""


def receipt(ended: Ended, *, prompt: PromptPrefix | None = None) -> Receipt:
    """An ended request in numbers, without its scene. `prompt` adds its block hashes."""
    block_size_tokens, blocks = receipt_blocks(prompt) if prompt else (0, [])
    served = ended.served
    choice = choice_of(served.plan) if served else None
    found = Receipt(
        **{name: getattr(ended, name) for name in _OF_ENDED},
        pod=choice.pod if choice else "",
        prefill_pod=choice.prefill_pod if choice else "",
        block_size_tokens=block_size_tokens,
        blocks=blocks,
        predicted_ms=expected_ttft_ms(served.cost) if served else None,
        predicted_cached_tokens=served.cached_tokens if served else None,
        phases_ms={phase: taken_s * 1000 for phase, taken_s in ended.phases_s.items()},
    )
    return found if ended.decision is None else _decided(found, ended.decision, served)


def decision_receipt(kept: RecordedDecision) -> Receipt:
    """The receipt of a decision whose request is still served."""
    facts = kept.scene
    known = Ended(
        facts.request_id, kept.at_s, facts.model, facts.endpoint.value, "", prompt_tokens=facts.prompt_tokens or 0
    )
    return _decided(receipt(known), kept, None)


def _decided(found: Receipt, kept: RecordedDecision, served: Candidate | None) -> Receipt:
    """The receipt with its decision: the best candidates, and the one that served."""
    shown = kept.candidates if served is None or served in kept.candidates else (*kept.candidates, served)
    return msgspec.structs.replace(
        found,
        tenant=kept.scene.tenant,
        workload=kept.scene.workload,
        stream=kept.scene.stream,
        policy=kept.policy.name,
        policy_version=kept.policy.version,
        reason=kept.reason,
        candidates=tuple(priced(candidate) for candidate in shown),
        candidate_count=kept.candidate_count,
        prompt=kept.prompt,
    )


class Explained(msgspec.Struct, frozen=True):
    explanation: Explanation
    receipt: Receipt


def explained(kept: RecordedDecision, ended: Ended | None = None) -> Explained:
    """The response of `/admin/explain`."""
    found = receipt(ended) if ended else decision_receipt(kept)
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
