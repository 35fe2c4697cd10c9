"""Generated traffic has the requested pattern."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from loadtest.simulator.generate import Bursts, Kind, TrafficMix
from loadtest.simulator.traffic import Session

BLOCK = 16


def sessions(*, seed: int = 0, speedup: float = 1.0, **mix: object) -> list[Session]:
    """All sessions; by default 2,000 in 200 s."""
    settings = {"sessions_per_s": 10.0, "duration_s": 200.0, "kinds": {"any": Kind()}, "block_size_tokens": BLOCK} | mix
    return list(TrafficMix.model_validate(settings).traffic(seed=seed, speedup=speedup).sessions)


def test_sessions_arrive_in_order_at_the_requested_rate() -> None:
    """2,000 within four standard deviations; for exponential gaps, mean and standard deviation are equal."""
    found = [session.start_s for session in sessions()]
    assert len(found) == pytest.approx(2000, abs=4 * 2000**0.5)
    assert found == sorted(found) and found[-1] < 200
    gaps = [later - earlier for earlier, later in pairwise(found)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.1)


def test_kinds_have_their_shares() -> None:
    """Weights, not percentages."""
    kinds = {"many": Kind(share=3), "few": Kind(share=1)}
    counts = Counter(session.kind for session in sessions(kinds=kinds))
    assert counts["many"] / counts.total() == pytest.approx(0.75, abs=0.04)


def test_popular_prefixes_follow_zipf() -> None:
    """The first of ten has a share of 1 / (1 + 1/2 + ... + 1/10), twice that of the second."""
    kinds = {"rag": Kind(prefixes=10, prefix_tokens=(160, 160), first_tokens=(20, 20))}
    counts = Counter(session.requests[0].blocks[0] for session in sessions(kinds=kinds)).most_common()
    total = sum(count for _, count in counts)
    assert len(counts) == 10
    assert counts[0][1] / total == pytest.approx(1 / sum(1 / rank for rank in range(1, 11)), abs=0.04)
    assert counts[0][1] / counts[1][1] == pytest.approx(2, rel=0.25)


def test_without_zipf_all_prefixes_are_equally_popular() -> None:
    """An exponent of 0."""
    kinds = {"rag": Kind(prefixes=4, prefix_tokens=(160, 160), zipf=0.0)}
    counts = Counter(session.requests[0].blocks[0] for session in sessions(kinds=kinds))
    assert all(count / counts.total() == pytest.approx(0.25, abs=0.04) for count in counts.values())


shapes = st.builds(
    Kind,
    prefixes=st.integers(0, 2),
    prefix_tokens=st.just((0, 100)),
    turns=st.just((1, 4)),
    first_tokens=st.just((0, 60)),
    next_tokens=st.just((0, 60)),
    output_tokens=st.just((0, 60)),
    think_s=st.just((1.0, 2.0)),
)


@given(shapes, st.integers(0, 9))
def test_each_prompt_of_a_session_extends_the_previous_answer(kind: Kind, seed: int) -> None:
    """Lengths grow, and full blocks stay the same and are unique."""
    for session in sessions(kinds={"any": kind}, duration_s=3.0, seed=seed):
        for before, after in pairwise(session.requests):
            assert after.prompt_tokens > before.prompt_tokens + before.output_tokens
            assert after.blocks[: len(before.blocks)] == before.blocks
            assert 1.0 <= after.think_s <= 2.0
        assert session.requests[0].think_s == 0.0
        for ask in session.requests:
            assert ask.prompt_blocks == ask.prompt_tokens // BLOCK
            assert len(ask.blocks) == (ask.prompt_tokens + ask.output_tokens - 1) // BLOCK
            assert len(set(ask.blocks)) == len(ask.blocks)


@given(st.integers(0, 100), st.integers(0, 9))
def test_sessions_share_exactly_the_whole_blocks_of_their_prefix(prefix_tokens: int, seed: int) -> None:
    """Blocks after it, including the one that it fills partly, belong to one session."""
    kind = Kind(prefixes=1, prefix_tokens=(prefix_tokens, prefix_tokens), first_tokens=(50, 80))
    found = sessions(kinds={"any": kind}, duration_s=3.0, seed=seed)
    whole = prefix_tokens // BLOCK
    counts = Counter(block for session in found for block in session.requests[0].blocks)
    shared = set(found[0].requests[0].blocks[:whole]) if found else set()
    assert len(shared) == (whole if found else 0)
    assert all(count == (len(found) if block in shared else 1) for block, count in counts.items())


def test_kinds_share_no_prefix() -> None:
    """Each kind has its own prefixes."""
    kind = Kind(prefixes=2, prefix_tokens=(320, 320))
    blocks: dict[str, set[int]] = {"one": set(), "other": set()}
    for session in sessions(kinds={"one": kind, "other": kind}):
        blocks[session.kind].update(session.requests[0].blocks)
    assert blocks["one"].isdisjoint(blocks["other"])


def test_bursts_multiply_the_rate_while_they_last() -> None:
    """Five times the rate during a burst, the normal rate otherwise."""
    found = sessions(bursts=Bursts(every_s=20.0, length_s=5.0, factor=5.0))
    within = sum(session.start_s % 20 < 5 for session in found)
    assert within / 50 == pytest.approx(50, rel=0.1)
    assert (len(found) - within) / 150 == pytest.approx(10, rel=0.1)


def test_a_burst_factor_may_be_below_one() -> None:
    """The rate is lower then."""
    found = sessions(bursts=Bursts(every_s=20.0, length_s=10.0, factor=0.1))
    within = sum(session.start_s % 20 < 10 for session in found)
    assert within / 100 == pytest.approx(1, rel=0.4)
    assert (len(found) - within) / 100 == pytest.approx(10, rel=0.15)


def test_the_same_seed_makes_the_same_traffic() -> None:
    """Each time it is read."""
    mix = TrafficMix(
        sessions_per_s=5, duration_s=20, kinds={"a": Kind(prefixes=3, prefix_tokens=(50, 90)), "b": Kind()}
    )
    assert list(mix.traffic(seed=3).sessions) == list(mix.traffic(seed=3).sessions)


def test_different_seeds_share_no_block() -> None:
    """Not even a prefix."""
    kinds = {"any": Kind(prefixes=2, prefix_tokens=(320, 320))}
    one, other = (
        {block for session in sessions(kinds=kinds, seed=seed) for ask in session.requests for block in ask.blocks}
        for seed in (0, 1)
    )
    assert one and other and one.isdisjoint(other)


def test_a_speedup_shortens_the_time_between_sessions() -> None:
    """Times inside a session stay the same."""
    kinds = {"any": Kind(turns=(1, 3), think_s=(1.0, 5.0))}
    slow, fast = sessions(kinds=kinds), sessions(kinds=kinds, speedup=2.0)
    assert [session.requests for session in fast] == [session.requests for session in slow]
    assert [session.start_s for session in fast] == pytest.approx([session.start_s / 2 for session in slow])


def test_a_span_with_min_above_max_is_refused() -> None:
    """When the file is read, not when the first session is generated."""
    with pytest.raises(ValidationError, match=r"expected \[min, max\]"):
        Kind(turns=(5, 2))
