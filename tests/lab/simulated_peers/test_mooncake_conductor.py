"""Conductor: when a pull is planned, and what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from loadtest.simulated_peers.peer_pickers import MooncakeConductor
from router.decision import Candidate, Direct, Pull
from router.types import InFlight, Link, Links, Scene
from tests.kit.scenes import SPEED, pod, works
from tests.lab.simulated_peers.fleets import BLOCKS, IDLE, TOKENS, chosen, decided, fleet

NAME = "mooncake_conductor"
KV_BYTES = 100_000
LINK = Link(t0_ms=2.0, bytes_per_ms=50_000_000.0)


def linked(seen: Scene, link: Link = LINK) -> Scene:
    """The same scene, where pods of known KV size can pull over `link`."""
    pods = tuple(replace(each, pod=replace(each.pod, kv_bytes_per_token=KV_BYTES)) for each in seen.fleet.pods)
    return structs.replace(seen, fleet=replace(seen.fleet, pods=pods, links=Links(elsewhere=link)))


fleets = st.builds(
    lambda work, held: linked(fleet(dict(zip("abcde", work, strict=False)), dict(zip("abcde", held, strict=True)))),
    st.lists(works, min_size=1, max_size=5),
    st.lists(st.integers(0, BLOCKS), min_size=5, max_size=5),
)


def queued(ms: float) -> InFlight:
    return InFlight(1, 1, prefill_ms=ms)


def plans(seen: Scene, picker: MooncakeConductor | None = None) -> dict[str, Candidate]:
    return {each.pod.id: each for each in decided(seen, NAME, picker).candidates}


def test_a_pull_is_priced_as_a_transfer_and_the_saved_prefill() -> None:
    """60 blocks at the holder, 20 here: 640 tokens of 100 kB over 50 GB/s after 2 ms are 3.28 ms."""
    seen = linked(fleet({"near": queued(7.0), "holder": queued(500.0)}, {"near": 20, "holder": 60}))
    near = plans(seen)["near"]
    assert near.plan == Direct(near.pod, Pull("holder", 960, 640))
    assert near.cached_tokens == 960
    assert [name for name, _ in near.cost.parts] == ["queue", "prefill", "transfer", "pulled"]
    assert dict(near.cost.parts)["transfer"] == pytest.approx(2.0 + 640 * KV_BYTES / 50_000_000)
    assert near.cost.total_ms == pytest.approx(7.0 + 3.28 + SPEED.prefill_ms(TOKENS, 960))
    assert near.cost.total_ms == pytest.approx(sum(ms for _, ms in near.cost.parts))


@pytest.mark.parametrize(("queue_ms", "winner", "pulls"), [(0.0, "holder", False), (500.0, "idle", True)])
def test_a_request_leaves_a_busy_holder_and_pulls_the_prefix(queue_ms: float, winner: str, pulls: bool) -> None:
    """That copy spreads a hot prefix."""
    seen = linked(fleet({"holder": queued(queue_ms), "idle": IDLE}, {"holder": 90}))
    best = decided(seen, NAME).candidates[0]
    assert best.pod.id == winner
    assert (best.plan.pull == Pull("holder", 1440, 1440)) is pulls


@pytest.mark.parametrize(("threshold", "pulls"), [(1.0, True), (2.9, True), (3.0, False)])
def test_the_ratio_of_matches_decides_whether_to_pull(threshold: float, pulls: bool) -> None:
    """60 to 20 is a ratio of 3; a pod that holds nothing always pulls."""
    seen = linked(fleet({"near": IDLE, "holder": queued(9.0), "cold": IDLE}, {"near": 20, "holder": 60}))
    planned = plans(seen, MooncakeConductor(balancing_threshold=threshold))
    assert (planned["near"].plan.pull is not None) is pulls
    assert planned["cold"].plan.pull == Pull("holder", 960, 960)
    assert planned["holder"].plan.pull is None


def test_a_slow_link_does_not_prevent_a_pull() -> None:
    """Only the ratio decides. The price includes the transfer, so the busy holder wins, and no recompute is planned."""
    seen = linked(fleet({"holder": queued(500.0), "idle": IDLE}, {"holder": 90}), Link(100.0, 10_000.0))
    assert plans(seen)["idle"].plan.pull is not None
    assert chosen(seen, NAME) == "holder"
    assert chosen(seen, "mooncake_local") == "idle"


def test_unknown_kv_bytes_prevent_a_pull() -> None:
    """Then nothing is pulled to that pod."""
    seen = fleet({"holder": queued(50.0), "idle": IDLE}, {"holder": 90}, pods=[pod("holder"), pod("idle")])
    assert (
        plans(structs.replace(seen, fleet=replace(seen.fleet, links=Links(elsewhere=LINK))))["idle"].plan.pull is None
    )


@given(seen=fleets)
def test_without_a_link_it_is_the_local_variant(seen: Scene) -> None:
    """Candidate for candidate."""
    unlinked = structs.replace(seen, fleet=replace(seen.fleet, links=Links()))
    assert decided(unlinked, NAME).candidates == decided(unlinked, "mooncake_local").candidates


@given(seen=fleets, threshold=st.sampled_from([1.0, 2.0, 8.0]))
def test_every_pull_brings_more_from_another_pod(seen: Scene, threshold: float) -> None:
    """By more than the threshold; and every explanation sums to its price."""
    local = {each.pod.id: each for each in decided(seen, "mooncake_local").candidates}
    for name, candidate in plans(seen, MooncakeConductor(balancing_threshold=threshold)).items():
        pull = candidate.plan.pull
        assert candidate.cost.total_ms == pytest.approx(sum(ms for _, ms in candidate.cost.parts), abs=1e-6)
        if pull is None:
            assert candidate == local[name]
        else:
            assert pull.holder != name
            assert pull.cached_tokens == candidate.cached_tokens == local[pull.holder].cached_tokens
            assert pull.cached_tokens > threshold * local[name].cached_tokens
