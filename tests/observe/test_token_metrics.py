"""Available, captured and delivered tokens: the gaps name the cause of a low hit rate."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from router.decision import Candidate, Cost, Direct, Plan, Pull, Split
from router.observe.class_metrics import TokenMetrics
from router.observe.ended import Ended
from router.observe.fast_metrics import Registry
from router.policy.recording import record
from router.types import BlocksByTier, PodId, PrefixMatch, Role
from tests.kit.scenes import BLOCK, held_by_tier, pod, prompt, ready, scene

LABELS = ("m", "chat", "mine")
PROMPT = prompt(100)
A, B = pod("a"), pod("b")
PAIR = pod("p", role=Role.PREFILL, handoff="nixl"), pod("d", role=Role.DECODE, handoff="nixl")


class Seen:
    """Metrics and their sums."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.metrics = TokenMetrics(self.registry)

    def add(
        self,
        plan: Plan,
        captured: int,
        match: Mapping[PodId, BlocksByTier],
        delivered: int | None = None,
        model: str = "m",
    ) -> None:
        served = Candidate(plan, Cost((), (), 0.0), captured)
        facts = {"prompt_tokens": 100, "cached_tokens": delivered, "served": served}
        ended = Ended("r", 0.0, model, "chat", "ok", workload=LABELS[1], policy=LABELS[2], **facts)  # type: ignore[arg-type]
        seen = record(scene(*ready(*PAIR), prompt=PROMPT, match=PrefixMatch(match)))
        self.metrics.add(ended, "acme", seen)

    def sum(self, name: str, **labels: str) -> float:
        samples = (sample for family in self.registry.collect() for sample in family.samples)
        return sum(
            one.value for one in samples if one.name == f"warmroute_{name}" and one.labels.items() >= labels.items()
        )

    def stages(self) -> tuple[float, float, float]:
        return tuple(self.sum(f"cached_tokens_{name}_total") for name in ("available", "captured", "delivered"))  # type: ignore[return-value]


def test_the_pod_with_the_longest_prefix_was_chosen() -> None:
    """All three lines are equal."""
    seen = Seen()
    seen.add(Direct(A), 4 * BLOCK, {"a": (4, 0, 0, 0), "b": (1, 0, 0, 0)}, 4 * BLOCK)
    assert seen.stages() == (4 * BLOCK, 4 * BLOCK, 4 * BLOCK)
    assert seen.sum("decisions_total", policy="mine", plan="direct", reason="prefix") == 1
    assert seen.sum("cached_tokens_error_sum") == 0


def test_another_pod_was_cheaper() -> None:
    """Captured is below available."""
    seen = Seen()
    seen.add(Direct(B), BLOCK, {"a": (4, 0, 0, 0), "b": (1, 0, 0, 0)}, BLOCK)
    assert seen.stages() == (4 * BLOCK, BLOCK, BLOCK)
    assert seen.sum("decisions_total", reason="price") == 1


def test_blocks_were_evicted_meanwhile() -> None:
    """Delivered is below captured."""
    seen = Seen()
    seen.add(Direct(A), 4 * BLOCK, {"a": (4, 0, 0, 0)}, 0)
    assert seen.stages() == (4 * BLOCK, 4 * BLOCK, 0)
    assert seen.sum("cached_tokens_error_sum", model="m") == 4 * BLOCK


def test_an_engine_that_reports_nothing_does_not_lower_the_hit_rate() -> None:
    """Its prompts are not among those that were reported."""
    seen = Seen()
    seen.add(Direct(A), 0, {}, None)
    assert (seen.sum("prompt_tokens_total"), seen.sum("reported_prompt_tokens_total")) == (100, 0)
    assert seen.sum("decisions_total", reason="cold") == 1


def test_what_a_decode_pod_held_and_the_prefill_pod_computed_was_computed_again() -> None:
    """By the engine's count, else as predicted. A pod of both roles is no decode pod; one block may be incomplete."""
    split = Split(*PAIR, 100)
    for match, captured, delivered, expected in (
        ({"p": (1, 0, 0, 0), "d": (4, 0, 0, 0), "a": (5, 0, 0, 0)}, BLOCK, None, (100 - BLOCK, 3 * BLOCK)),
        ({"p": (1, 0, 0, 0), "d": (4, 0, 0, 0)}, BLOCK, 4 * BLOCK, (100 - 4 * BLOCK, 0)),
        ({"d": (1, 0, 0, 0)}, 0, 0, (100, 0)),
        ({}, 0, None, (100, 0)),
    ):
        seen = Seen()
        seen.add(split, captured, match, delivered)
        tokens = [seen.sum("split_prompt_tokens_total", dialect="nixl", tokens=one) for one in ("computed", "again")]
        assert tuple(tokens) == expected


def test_tiers_and_pulled_tokens_are_distinguished() -> None:
    """What the pod does not hold itself is pulled from a peer."""
    seen = Seen()
    seen.add(Direct(B, Pull("a", 5 * BLOCK, 2 * BLOCK)), 5 * BLOCK, {"a": (1, 4, 0, 0), "b": (1, 0, 2, 0)})
    available = {tier: seen.sum("cached_tokens_available_total", tier=tier) for tier in ("gpu", "cpu", "disk")}
    captured = {tier: seen.sum("cached_tokens_captured_total", tier=tier) for tier in ("gpu", "disk", "peer")}
    assert available == {"gpu": BLOCK, "cpu": 4 * BLOCK, "disk": 0}
    assert captured == {"gpu": BLOCK, "disk": 2 * BLOCK, "peer": 2 * BLOCK}
    assert seen.sum("decisions_total", plan="pull", reason="price") == 1


def test_the_prefill_pod_of_a_split_captures() -> None:
    """The decode pod's own blocks do not count."""
    seen = Seen()
    seen.add(Split(A, B, 100), 2 * BLOCK, {"a": (2, 0, 0, 0), "b": (1, 0, 0, 0)})
    assert seen.sum("decisions_total", plan="split", reason="prefix") == 1


def test_tenants_have_the_same_sums() -> None:
    """Until they are no longer among the busiest."""
    seen = Seen()
    seen.add(Direct(A), BLOCK, {"a": (2, 0, 0, 0)}, 48)
    stages = [seen.sum("tenant_prompt_tokens_total", tenant="acme", stage=one) for one in ("all", "available")]
    stages += [seen.sum("tenant_prompt_tokens_total", tenant="acme", stage=one) for one in ("captured", "delivered")]
    assert stages == [100, 2 * BLOCK, BLOCK, 48]
    seen.metrics.remove_tenants(["acme"])
    assert seen.sum("tenant_prompt_tokens_total") == 0
    seen.add(Direct(A), 0, {}, None)
    assert seen.sum("tenant_prompt_tokens_total", stage="all") == 100


@given(st.data(), st.integers(0, 6))
def test_tiers_add_up(data: st.DataObject, blocks: int) -> None:
    """To the longest prefix, and to the tokens that were captured."""
    held = {name: data.draw(held_by_tier(data.draw(st.integers(0, blocks)))) for name in ("a", "b")}
    captured = data.draw(st.integers(0, 100))
    seen = Seen()
    seen.add(Direct(A), captured, held)
    assert seen.stages()[:2] == (BLOCK * max(map(sum, held.values())), captured)
