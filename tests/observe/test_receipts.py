"""Receipts: decision and outcome in numbers."""

from __future__ import annotations

import msgspec
import pytest

from router.observe.ended import MAX_CANDIDATES, Ended, Failure, RecordedDecision
from router.observe.receipts import decision_receipt, explained, receipt, receipt_blocks
from router.policy.decide import decide
from router.policy.price import Choice
from router.policy.recording import record
from router.types import Generation, PromptPrefix
from tests.kit.scenes import POLICIES, holding, pod, ready, request, scene

BY = POLICIES["cost_aware"]


def prefix(block_size_tokens: int, blocks: int) -> PromptPrefix:
    generation = Generation(model="m", block_size_tokens=block_size_tokens)
    return PromptPrefix(generation, range(block_size_tokens * blocks + 3), list(range(100, 100 + blocks)))


def kept(pods: int = 8) -> RecordedDecision:
    seen = holding(scene(*ready(*(pod(f"p{number}") for number in range(pods))), request=request("req-7")), "p1", 40)
    return RecordedDecision.of(record(seen), decide(seen, BY), BY, 12.0)


@pytest.mark.parametrize(
    ("block_size_tokens", "blocks", "kept"),
    [(16, 5, (32, [101, 103])), (16, 1, (32, [])), (8, 9, (32, [103, 107])), (512, 2, (512, [100, 101]))],
)
def test_a_receipt_holds_a_subset_of_the_hashes(
    block_size_tokens: int, blocks: int, kept: tuple[int, list[int]]
) -> None:
    """A chain hash covers the whole prefix, so the others are not needed."""
    assert receipt_blocks(prefix(block_size_tokens, blocks)) == kept


def test_a_request_in_progress_has_a_receipt_without_a_result() -> None:
    """The best candidates with all parts, and the number of all."""
    found = decision_receipt(kept())
    assert (found.id, found.policy, found.policy_version, found.result) == ("req-7", "cost_aware", BY.version, "")
    assert (found.at_s, found.prompt_tokens, found.candidate_count) == (12.0, 1000, 8)
    assert len(found.candidates) == MAX_CANDIDATES and found.candidates[0].choice == Choice("p1")
    assert dict(found.candidates[0].parts)["prefill"] > 0


def test_the_candidate_that_served_is_kept_at_any_rank() -> None:
    """After a retry it may not be among the best."""
    seen = scene(*ready(*(pod(f"p{number}") for number in range(8))))
    decision = decide(seen, BY)
    made = RecordedDecision.of(record(seen), decision, BY, 0.0)
    failures = (Failure("p3", "connect_failed", "refused"),)
    ended = Ended("r", 1.0, "m", "chat", "ok", served=decision.candidates[7], failures=failures, decision=made)
    found = receipt(ended)
    assert [plan.choice.pod for plan in found.candidates][-1] == found.pod == decision.candidates[7].pod.id
    assert len(found.candidates) == MAX_CANDIDATES + 1 and found.failures == failures
    assert len(receipt(msgspec.structs.replace(ended, served=decision.candidates[0])).candidates) == MAX_CANDIDATES


def test_a_request_that_was_never_decided_has_a_receipt() -> None:
    """With the known fields."""
    ended = Ended(id="r", at_s=1.0, model="m", endpoint="chat", result="no_ready_pod", phases_s={"admit": 0.002})
    found = receipt(ended)
    assert (found.id, found.result, found.pod, found.candidates) == ("r", "no_ready_pod", "", ())
    assert found.phases_ms == {"admit": 2.0}


def test_an_explanation_matches_the_recorded_decision() -> None:
    """Both parts have the same candidates."""
    found = explained(kept())
    assert [column.plan for column in found.explanation.columns] == list(found.receipt.candidates)
    assert found.explanation.why.startswith("p1, by lowest cost: ")
