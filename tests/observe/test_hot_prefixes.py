"""The prefixes that saved the most, from the decisions in memory."""

from __future__ import annotations

from router.observe.ended import Ended, RecordedDecision
from router.observe.recent_decisions import MAX_PREFIXES, Kept, PrefixTally
from router.policy.decide import decide
from router.policy.recording import record
from tests.kit.scenes import BLOCK, POLICIES, holding, pod, prompt, ready, request, scene

BY = POLICIES["cost_aware"]


def served(at_s: float, salt: int, cached_tokens: int, held_blocks: int = 0, result: str = "ok") -> Kept:
    """One request; another salt is another prefix. Pod b holds `held_blocks` of it."""
    seen = scene(*ready(pod("a"), pod("b")), request=request(f"r{at_s}"), prompt=prompt(1000, salt))
    seen = holding(seen, "b", held_blocks) if held_blocks else seen
    decision = decide(seen, BY)
    facts = {"prompt_tokens": 1000, "cached_tokens": cached_tokens, "served": decision.candidates[0]}
    ended = Ended("r", at_s, "m", "chat", result, **facts)  # type: ignore[arg-type]
    return RecordedDecision.of(record(seen), decision, BY, at_s), ended


def tallied(*decisions: Kept) -> PrefixTally:
    tally = PrefixTally()
    for one in decisions:
        tally.add(*one)
    return tally


def test_requests_with_a_prefix_in_common_are_added() -> None:
    """Length and holders are those of the last request."""
    first, last = served(1.0, 0, 0), served(5.0, 0, 320, held_blocks=20)
    first[0].excerpt, last[0].excerpt = "Be brief. / What is", "Be brief. / When"
    (found,) = tallied(last, first, served(3.0, 0, 160, held_blocks=10)).hottest()
    assert (found.requests, found.hits, found.saved_tokens, found.prompt_tokens) == (3, 2, 480, 3000)
    assert (found.length_tokens, found.holders, found.text) == (20 * BLOCK, 1, "Be brief. / Wh")
    assert (found.first_s, found.last_s) == (1.0, 5.0)


def test_the_prefix_that_saved_the_most_is_first_and_one_that_saved_nothing_is_left_out() -> None:
    found = tallied(served(1.0, 0, 16), served(2.0, 9000, 32), served(3.0, 18000, 0)).hottest()
    assert [one.saved_tokens for one in found] == [32, 16]


def test_failed_and_unfinished_requests_save_nothing() -> None:
    unfinished, _ = served(1.0, 0, 16)
    assert tallied((unfinished, None), served(2.0, 0, 16, result="pod_error")).hottest() == []


def test_the_number_of_prefixes_is_bounded() -> None:
    many = tallied(*(served(1.0, 9000 * number, 16 + number) for number in range(MAX_PREFIXES + 5)))
    assert [one.saved_tokens for one in many.hottest()][-1] == 16 + 5
