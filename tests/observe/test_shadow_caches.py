"""Shadow caches: what caches would hold under another placement, and what hits saved."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random
from typing import Any

import msgspec
import pytest

from router.decision import Candidate, Direct, Split
from router.observe.declared import of_decisions
from router.observe.ended import Ended, RecordedDecision
from router.observe.metrics import Metrics
from router.observe.recent_decisions import RecentDecisions
from router.observe.shadow_caches import ENTRY_TOKENS, SLICE_ENTRIES, ShadowCache, ShadowCaches
from router.policy.decide import decide
from router.types import Generation, Pod, PodLoad, PodSpeed, PromptPrefix, Role
from tests.kit.scenes import BLOCK, POLICIES, pod, ready, request, scene

BY = POLICIES["cost_aware"]
FAST, SLOW = PodSpeed(10.0, 0.1, 1e-5), PodSpeed(10.0, 0.4, 4e-5)
STRIDE = ENTRY_TOKENS // BLOCK


def hashes(name: int, blocks: int, common: int = 0) -> list[int]:
    """Those of one prompt; all prompts have the first `common` in common. Equal low bytes are rare, as of real ones."""
    return [hash((0 if at < common else name, at)) % 2**64 for at in range(blocks)]


class Traffic:
    """Requests, decided and ended, to pods a, b and c. Pod b has four GPUs and is slower."""

    def __init__(self, capacity_tokens: int = 100_000, **limits: Any) -> None:
        self.metrics = Metrics()
        self.shadows = ShadowCaches(
            self.metrics, lambda one: 4 if one.id == "b" else 1, 400_000, **{"max_followed_per_s": inf} | limits
        )
        self.recent = RecentDecisions(size=1, on_decided=self.shadows.decided)
        self.pods = {
            name: pod(name, speed=SLOW if name == "b" else FAST, capacity_tokens=capacity_tokens) for name in "abc"
        }
        self.turn = self.shared_blocks = 0
        self.now_s = self.scraped_at_s = 0.0

    def decided(
        self, blocks: list[int], turn: int | None = None, name: str = "", plan: Split | None = None
    ) -> tuple[RecordedDecision, PromptPrefix]:
        self.turn = self.turn + 1 if turn is None else turn
        prefix = PromptPrefix(Generation(model="m", block_size_tokens=BLOCK), range(len(blocks) * BLOCK + 1), blocks)
        asked = request(name or f"r{self.turn}")
        load = PodLoad(scraped_at_s=self.scraped_at_s)
        statuses = [replace(status, load=load) for status in ready(*self.pods.values())]
        facts: dict[str, Any] = {"turn": self.turn, "shared_blocks": self.shared_blocks, "now_s": self.now_s}
        seen = scene(*statuses, request=asked, prompt=prefix, **facts)
        decision = decide(seen, BY)
        if plan is not None:
            decision = msgspec.structs.replace(decision, candidates=(Candidate(plan, decision.candidates[0].cost, 0),))
        return self.recent.record(seen, decision, BY, self.now_s), prefix

    def end(
        self, one: tuple[RecordedDecision, PromptPrefix], by: str, cached_tokens: int | None = 0, **facts: Any
    ) -> None:
        kept, prefix = one
        served = Candidate(Direct(self.pods[by]), kept.candidates[0].cost, 0)
        usual = {"id": kept.scene.request_id, "at_s": kept.at_s, "model": "m", "endpoint": "chat", "result": "ok"}
        usual |= {"served": served, "cached_tokens": cached_tokens, "prompt_tokens": len(prefix.tokens)}
        self.shadows.ended(Ended(**{**usual, "decision": kept, **facts}), prefix)

    def serve(self, blocks: list[int], by: str, cached_tokens: int | None = 0, **facts: Any) -> None:
        self.end(self.decided(blocks), by, cached_tokens, **facts)

    def counted(self, what: Any = of_decisions.PLACED_CACHED_TOKENS) -> dict[str, float]:
        for _ in self.shadows.follow():
            pass
        return {labels[1]: value for labels, [value] in self.metrics[what].series().items()}


# --- one cache ---


def entries(blocks: list[int]) -> list[tuple[int, bytes]]:
    low = bytes(one & 255 for one in blocks)
    return [(blocks[at], low[at : at + STRIDE]) for at in range(0, len(blocks), STRIDE)]


def test_a_cache_holds_what_two_prompts_have_in_common_to_the_block() -> None:
    """Whether they part in the first entry, in a later one or at the end of one."""
    cache = ShadowCache(0, 1)
    assert cache.serve(entries(hashes(1, 100)), 0, 999.0, 1) == 0
    for common in (3, 40, 64):
        assert cache.serve(entries([*hashes(1, common), *hashes(2 + common, 20)]), 0, 999.0, 1) == common
    assert cache.serve(entries(hashes(1, 100)), 0, 999.0, 1) == 100


def test_a_full_cache_drops_the_end_of_the_prompt_that_was_used_longest_ago() -> None:
    cache = ShadowCache(0, 1)
    for name in (1, 2, 1, 3):
        cache.serve(entries(hashes(name, 4 * STRIDE)), 0, 10.0 * STRIDE, 1)
    assert cache.serve(entries(hashes(1, 4 * STRIDE)), 0, 10.0 * STRIDE, 1) == 4 * STRIDE
    assert 0 < cache.serve(entries(hashes(2, 4 * STRIDE)), 0, 10.0 * STRIDE, 1) < 4 * STRIDE


def test_of_a_sample_the_prefix_that_all_share_takes_its_share_of_the_space() -> None:
    """Eight entries of it take one of four; a sixteenth of all prompts comes."""
    cache = ShadowCache(0, 1)
    for name in (1, 2):
        cache.serve(entries([*hashes(0, 8 * STRIDE), *hashes(name, STRIDE)]), 8, 4.0 * STRIDE, 16)
    assert cache.serve(entries([*hashes(0, 8 * STRIDE), *hashes(1, STRIDE)]), 8, 4.0 * STRIDE, 16) == 9 * STRIDE


# --- placements ---


def test_round_robin_has_caches_of_its_own() -> None:
    """The chosen pod holds the prompt from the second request on; under round robin each pod computes it once."""
    traffic = Traffic()
    for number in range(6):
        traffic.serve(hashes(1, 40), "a", 40 * BLOCK if number else 0)
    assert traffic.counted()["chosen"] == 5 * 40 * BLOCK
    assert traffic.counted()["round_robin"] == 3 * 40 * BLOCK


def test_least_load_sends_a_prefix_to_one_pod_while_it_is_idle_and_to_others_meanwhile() -> None:
    traffic = Traffic()
    for number in range(3):
        traffic.serve(hashes(1, 40), "a", 40 * BLOCK if number else 0)
        traffic.counted()
    assert traffic.counted()["least_load"] == 2 * 40 * BLOCK
    together = [traffic.decided(hashes(1, 40)) for _ in range(3)]
    for one in together:
        traffic.end(one, "a", 40 * BLOCK)
    assert traffic.counted()["least_load"] == 3 * 40 * BLOCK, "the two other pods do not hold it"


def test_least_load_takes_a_pod_for_busy_until_a_scrape_shows_it_idle() -> None:
    """The next turn comes before the next scrape, so the real one sends it elsewhere."""
    traffic = Traffic()
    traffic.serve(hashes(1, 40), "a", e2e_ms=1000.0)
    for now_s, scraped_at_s, cached_blocks in ((1.5, 0.9, 0), (4.0, 3.9, 40)):
        traffic.now_s, traffic.scraped_at_s = now_s, scraped_at_s
        traffic.serve(hashes(1, 40), "a", 40 * BLOCK, e2e_ms=1000.0)
        assert traffic.counted()["least_load"] == cached_blocks * BLOCK


def test_under_least_load_a_request_takes_longer_by_the_prefill_of_what_its_pod_lacks() -> None:
    """640 tokens take 68 ms on a or c, 272 ms on b. The first pod is busy, so the second one computes them, too."""
    for late_s, cached_blocks in ((0.05, 0), (0.3, 40)):
        traffic = Traffic()
        traffic.serve(hashes(1, 40), "a")
        traffic.now_s = traffic.scraped_at_s = 2.0
        traffic.decided(hashes(1, 40))
        traffic.serve(hashes(1, 40), "a", 40 * BLOCK, e2e_ms=1000.0)
        traffic.now_s = traffic.scraped_at_s = 3.0 + late_s
        traffic.serve(hashes(1, 40), "a", 40 * BLOCK)
        assert traffic.counted()["least_load"] == cached_blocks * BLOCK


def test_a_request_that_is_decided_again_is_placed_once() -> None:
    traffic = Traffic()
    for turn in (3, 4, 5):
        one = traffic.decided(hashes(1, 40), turn, "waits")
    traffic.end(one, "a")
    for turn in (3, 6):
        traffic.end(traffic.decided(hashes(1, 40), turn), "a", 40 * BLOCK)
    assert traffic.counted()["round_robin"] == 2 * 40 * BLOCK


def test_the_next_turn_finds_the_answer_to_the_last_on_its_own_pod_only() -> None:
    """Engines keep what they generate, and the next prompt repeats it."""
    traffic = Traffic()
    traffic.end(traffic.decided(hashes(1, 40), 3), "a", output_tokens=10 * BLOCK)
    traffic.end(traffic.decided(hashes(1, 60), 6), "a", 50 * BLOCK)
    traffic.end(traffic.decided(hashes(1, 60), 7), "a", 60 * BLOCK)
    assert traffic.counted()["round_robin"] == 50 * BLOCK


def test_a_hit_saves_the_prefill_of_its_tokens_by_the_pods_own_speed_and_gpus() -> None:
    """c1 p + c2 p^2; the time of a pod counts for each of its GPUs."""
    traffic = Traffic()
    traffic.serve(hashes(1, 40), "b")
    traffic.serve(hashes(1, 40), "b", 640)
    saved, gpus = traffic.counted(of_decisions.PREFILL_SAVED_S), traffic.counted(of_decisions.PREFILL_SAVED_GPU_S)
    assert saved["chosen"] == pytest.approx((0.4 * 640 + 4e-5 * 640**2) / 1000)
    assert gpus["chosen"] == pytest.approx(4 * saved["chosen"])


@pytest.mark.parametrize("facts", [{"result": "pod_error"}, {"served": None}])
def test_requests_that_were_not_served_save_nothing_and_leave_no_load(facts: dict[str, Any]) -> None:
    traffic = Traffic()
    for _ in range(2):
        traffic.serve(hashes(1, 40), "a", 640, **facts)
    assert {*traffic.counted().values(), *traffic.counted().values()} <= {0.0}
    assert not traffic.shadows._placed
    traffic.decided(hashes(2, 40))
    traffic.counted()
    assert [load.tokens for load in traffic.shadows._outstanding.values() if load.tokens] == [641], "that of the last"


def test_a_split_saves_prefill_on_the_pods_that_compute_prompts() -> None:
    """Alternatives choose among these."""
    traffic = Traffic()
    roles: dict[str, Pod] = {
        name: pod(name, speed=SLOW, role=role, handoff="nixl")
        for name, role in (("p", Role.PREFILL), ("q", Role.PREFILL), ("d", Role.DECODE))
    }
    traffic.pods = roles
    plan = Split(roles["p"], roles["d"])
    for number in range(4):
        one = traffic.decided(hashes(1, 40), plan=plan)
        traffic.end(one, "p", 640 if number else 0, served=one[0].candidates[0])
    saved = traffic.counted(of_decisions.PREFILL_SAVED_S)
    assert saved["chosen"] == pytest.approx(3 * SLOW.compute_ms(0, 640) / 1000)
    assert saved["round_robin"] == pytest.approx(2 * SLOW.compute_ms(0, 640) / 1000)


# --- the error ---


def test_in_front_of_caches_that_were_full_before_alternatives_count_as_equally_good() -> None:
    """The router has restarted; then its shadow caches fill, and the difference counts from there on."""
    traffic = Traffic()
    for name in range(6):
        traffic.serve(hashes(name, 40), "a", 640)
    found = traffic.counted()
    assert found["round_robin"] == found["least_load"] == found["chosen"] == 6 * 640
    assert traffic.shadows.watches["m"].error == pytest.approx(-1, abs=0.01)
    for number in range(1200):
        traffic.serve(hashes(6 + number % 3, 40), "a", 640 if number >= 3 else 0)
        before = traffic.counted()
    assert abs(traffic.shadows.watches["m"].error) < 0.01
    traffic.serve(hashes(100, 40), "a", 0)
    traffic.end(traffic.decided(hashes(100, 40), traffic.turn + 1), "a", 640)
    after = traffic.counted()
    assert after["chosen"] - before["chosen"] == pytest.approx(640) and after["round_robin"] == before["round_robin"]


def test_a_pod_that_restarts_has_empty_shadow_caches() -> None:
    traffic = Traffic()
    traffic.serve(hashes(1, 40), "a")
    traffic.pods = {name: pod(name, speed=FAST, epoch=2) for name in "abc"}
    traffic.serve(hashes(1, 40), "a", 0)
    assert traffic.shadows.watches["m"].control[1] == traffic.counted()["chosen"] == 0


# --- bounds ---


def test_more_entries_than_fit_halve_the_sample_and_the_shares_stay() -> None:
    """There are 600 documents with a common beginning, popular and rare ones, and pods do not hold all of them."""

    def shares(**limits: Any) -> tuple[ShadowCaches, dict[str, float]]:
        traffic, random = Traffic(1500 * ENTRY_TOKENS // 3, **limits), Random(1)
        traffic.shared_blocks = 2 * STRIDE
        pods = {name: ShadowCache(0, 1) for name in "abc"}
        for number in range(7000):
            if number == 3000:
                start = traffic.counted(), traffic.counted(of_decisions.PLACED_PROMPT_TOKENS)
            name = int(600 * random.random() ** 2)
            blocks, by = hashes(name + 1, 6 * STRIDE, 2 * STRIDE), "abc"[name % 3]
            traffic.serve(blocks, by, pods[by].serve(entries(blocks), 0, 500 * STRIDE, 1) * BLOCK)
            if number % 50 == 0:
                traffic.counted()
        cached, prompts = traffic.counted(), traffic.counted(of_decisions.PLACED_PROMPT_TOKENS)
        return traffic.shadows, {
            placement: (cached[placement] - start[0][placement]) / (prompts[placement] - start[1][placement])
            for placement in cached
        }

    (full, whole), (sampled, part) = shares(), shares(max_entries=800)
    assert full.sample == 1 < sampled.sample and full.entries > 3000 and sampled.entries <= 800
    assert whole["round_robin"] < whole["chosen"] - 0.05
    assert part == pytest.approx(whole, abs=0.05)


def test_a_sample_is_followed_where_many_requests_come() -> None:
    traffic = Traffic(max_followed_per_s=10.0)
    for number in range(400):
        traffic.serve(hashes(number, 4), "a")
    in_flight = [traffic.decided(hashes(number, 4)) for number in range(100, 120)]
    traffic.counted()
    assert traffic.shadows.sample >= 8
    for one in in_flight:
        traffic.end(one, "a")
    traffic.counted()
    assert not traffic.shadows._placed and not any(traffic.shadows._outstanding.values())
    pending = len(traffic.shadows._pending)
    for number in range(400):
        traffic.serve(hashes(number, 4), "a")
    assert len(traffic.shadows._pending) - pending < 2 * 400 / 4


def test_much_is_followed_in_parts() -> None:
    """Each of about a millisecond."""
    traffic = Traffic()
    for number in range(60):
        traffic.serve(hashes(number, 2000), "a")
    parts = sum(1 for _ in traffic.shadows.follow())
    assert parts >= 60 * (2000 // STRIDE) // (SLICE_ENTRIES + 150) - 1


def test_caches_that_are_too_many_are_halved_one_after_the_other() -> None:
    """Half of `MAX_ENTRIES` at once would stop the event loop for 20 ms."""
    traffic = Traffic(max_entries=100)
    for number in range(3):
        traffic.serve(hashes(number, 50 * STRIDE), "abc"[number])
    assert sum(1 for _ in traffic.shadows.follow()) >= len(traffic.shadows._caches)
    assert traffic.shadows.entries <= 100 and traffic.shadows.sample > 1
