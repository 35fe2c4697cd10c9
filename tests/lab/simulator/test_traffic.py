"""Traces become the traffic that was recorded, and one cache that never evicts measures its reuse."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.simulator.traffic import (
    IdealCache,
    Session,
    TraceRequest,
    TrafficRequest,
    hashed_request,
    mooncake_traffic,
    read_mooncake,
    read_receipts,
    receipts_traffic,
    with_answers,
)
from router.errors import ConfigError
from router.hashing import token_array

GOOD = {"timestamp": 27_482, "input_length": 1025, "output_length": 52, "hash_ids": [46, 47, 2353]}


def jsonl(folder: Path, *lines: str) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def starts(sessions: object) -> list[float]:
    assert isinstance(sessions, list)
    return [session.start_s for session in sessions]


def test_a_line_becomes_one_request_with_its_blocks(tmp_path: Path) -> None:
    """The last block may be cut short; the blocks of the answer are unknown. Block 0 of a trace is 1."""
    traffic = mooncake_traffic(read_mooncake(jsonl(tmp_path, json.dumps(GOOD))))
    (session,) = traffic.sessions
    (ask,) = session.requests
    assert (session.start_s, ask.prompt_tokens, ask.output_tokens) == (0.0, 1025, 52)
    assert (list(ask.blocks), ask.prompt_blocks) == ([47, 48, 2354], 3)
    assert (traffic.request_count, traffic.block_size_tokens) == (1, 512)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "",
        json.dumps(GOOD | {"hash_ids": [46, 47]}),
        json.dumps(GOOD | {"input_length": 0, "hash_ids": []}),
        json.dumps({key: value for key, value in GOOD.items() if key != "output_length"}),
        json.dumps(GOOD | {"timestamp": "noon"}),
        json.dumps(GOOD | {"hash_ids": [-1, 2, 3]}),
    ],
    ids=["no JSON", "empty", "too few blocks", "no prompt", "no output", "no time", "negative block"],
)
def test_an_invalid_line_is_reported(tmp_path: Path, line: str) -> None:
    """With file and line number."""
    path = jsonl(tmp_path, json.dumps(GOOD), line)
    with pytest.raises(ConfigError, match=r"trace\.jsonl:2: invalid line of a Mooncake trace"):
        read_mooncake(path)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    """By its path."""
    with pytest.raises(ConfigError, match="nowhere"):
        read_mooncake(tmp_path / "nowhere.jsonl")


rounded = st.lists(st.integers(0, 20), min_size=1, max_size=30).map(sorted)


def played(ticks: list[int], jitter_s: float, seed: int = 0, speedup: float = 1.0) -> list[Session]:
    """Arrivals rounded to 3 s, as in the public trace. The length of a prompt is its position."""
    trace = [TraceRequest(tick * 3000, 1 + number, 1, [number]) for number, tick in enumerate(ticks)]
    return list(mooncake_traffic(trace, jitter_s=jitter_s, seed=seed, speedup=speedup).sessions)


@given(rounded, st.integers(0, 5))
def test_jitter_keeps_the_order_of_different_times(ticks: list[int], seed: int) -> None:
    """No request arrives before its own tick or after the next one."""
    sessions = played(ticks, 3.0, seed)
    assert starts(sessions) == sorted(starts(sessions))
    assert sorted(session.requests[0].prompt_tokens for session in sessions) == list(range(1, len(ticks) + 1))
    for session in sessions:
        tick = ticks[session.requests[0].prompt_tokens - 1] - ticks[0]
        assert 3 * tick <= session.start_s <= 3 * (tick + 1)


def test_jitter_spreads_simultaneous_arrivals_and_depends_only_on_the_seed() -> None:
    """Without it they arrive at once."""
    ticks = [0] * 20
    assert set(starts(played(ticks, 0.0))) == {0.0}
    assert len(set(starts(played(ticks, 3.0)))) == 20
    assert starts(played(ticks, 3.0, seed=1)) == starts(played(ticks, 3.0, seed=1))
    assert starts(played(ticks, 3.0, seed=1)) != starts(played(ticks, 3.0, seed=2))


@given(rounded, st.sampled_from([0.5, 2.0, 4.0]))
def test_a_speedup_divides_all_times(ticks: list[int], speedup: float) -> None:
    """It changes nothing else."""
    slow, fast = played(ticks, 3.0), played(ticks, 3.0, speedup=speedup)
    assert starts(fast) == pytest.approx([at_s / speedup for at_s in starts(slow)])
    assert [session.requests for session in fast] == [session.requests for session in slow]


RECEIPT = {
    "request_id": "r",
    "model": "m",
    "at_s": 100.0,
    "prompt_tokens": 40,
    "output_tokens": 7,
    "block_size_tokens": 16,
    "blocks": [5, 6],
}


def test_our_own_receipts_are_replayed_as_recorded(tmp_path: Path) -> None:
    """In order of arrival, with their shared blocks; receipts without a prompt or an answer are left out."""
    lines = [RECEIPT | {"at_s": 102.0, "blocks": [5, 9]}, RECEIPT, RECEIPT | {"output_tokens": None}, {"at_s": 99.0}]
    traffic = receipts_traffic(read_receipts(jsonl(tmp_path, *map(json.dumps, lines))), speedup=2.0)
    sessions = list(traffic.sessions)
    assert starts(sessions) == [0.0, 1.0]
    asks = [session.requests[0] for session in sessions]
    assert [(ask.prompt_tokens, ask.output_tokens, list(ask.blocks)) for ask in asks] == [
        (40, 7, [5, 6]),
        (40, 7, [5, 9]),
    ]
    assert (traffic.block_size_tokens, traffic.request_count, sessions[0].kind) == (16, 2, "m")


def test_an_invalid_receipt_is_reported(tmp_path: Path) -> None:
    """With file and line number, which counts lines that are left out."""
    path = jsonl(tmp_path, json.dumps({"at_s": 99.0}), json.dumps(RECEIPT), "{}")
    with pytest.raises(ConfigError, match=r"trace\.jsonl:3: not a receipt"):
        read_receipts(path)


def test_receipts_of_two_versions_are_read_in_the_larger_block_size(tmp_path: Path) -> None:
    """Chain hashes cover all before them, so the others of a prompt are left out."""
    finer = RECEIPT | {"block_size_tokens": 8, "blocks": [4, 5, 55, 6]}
    traffic = receipts_traffic(read_receipts(jsonl(tmp_path, json.dumps(RECEIPT), json.dumps(finer))))
    assert traffic.block_size_tokens == 16
    assert [list(session.requests[0].blocks) for session in traffic.sessions] == [[5, 6], [5, 6]]


def test_a_seed_delays_receipts_by_its_own_jitter(tmp_path: Path) -> None:
    receipts = read_receipts(jsonl(tmp_path, *(json.dumps(RECEIPT | {"at_s": 100.0 + 9 * at}) for at in range(3))))
    one, other, plain = (
        starts(list(receipts_traffic(receipts, jitter_s=jitter, seed=seed).sessions))
        for jitter, seed in ((1.0, 1), (1.0, 2), (0.0, 1))
    )
    assert plain == [0.0, 9.0, 18.0] and one != other
    assert all(0 <= found - at <= 1 for found, at in zip(one, plain, strict=True))


@pytest.mark.parametrize("sizes", [[], [16, 24]], ids=["none usable", "two sizes"])
def test_receipts_need_one_block_size(tmp_path: Path, sizes: list[int]) -> None:
    """Blocks of different sizes cannot be compared."""
    path = jsonl(
        tmp_path, json.dumps({"at_s": 1.0}), *(json.dumps(RECEIPT | {"block_size_tokens": one}) for one in sizes)
    )
    with pytest.raises(ConfigError, match="must have one block size"):
        receipts_traffic(read_receipts(path))


BLOCK = 4


def serve(cache: IdealCache, prompt: Iterable[int], output: Iterable[int]) -> int:
    return cache.serve(hashed_request(token_array(prompt), token_array(output), BLOCK))


def test_a_repeated_prompt_is_found_except_its_last_block() -> None:
    """Engines always compute the last token, and reuse whole blocks only."""
    cache = IdealCache(BLOCK)
    assert serve(cache, range(8), [100]) == 0
    assert serve(cache, range(8), [100]) == 4
    assert serve(cache, range(9), [100]) == 8


def test_the_next_turn_finds_the_answer_to_the_last_except_its_final_token() -> None:
    """Generated tokens are held once a later step has computed them."""
    cache = IdealCache(BLOCK)
    serve(cache, range(6), [50, 51, 52])
    assert serve(cache, [*range(6), 50, 51, 52, 9], [1]) == 8
    cache = IdealCache(BLOCK)
    serve(cache, range(6), [50, 51])
    assert serve(cache, [*range(6), 50, 51, 52, 9], [1]) == 4


def test_equal_blocks_behind_different_prefixes_are_different() -> None:
    """KV depends on everything before it."""
    cache = IdealCache(BLOCK)
    serve(cache, [1, 1, 1, 1, 5, 5, 5, 5, 0], [0])
    assert serve(cache, [2, 2, 2, 2, 5, 5, 5, 5, 0], [0]) == 0


def test_answers_that_the_next_prompt_repeats_have_its_blocks() -> None:
    """Blocks of 16 tokens. The second prompt repeats 40 + 30 tokens, the third is too short to repeat an answer, and a
    prompt that an earlier one has shared awaits none."""
    first = TrafficRequest(40, 30, [1, 2, 30], 3)
    second = TrafficRequest(80, 8, [1, 2, 3, 4, 5], 5)
    short = TrafficRequest(84, 9, [1, 2, 3, 4, 5, 60], 6)
    shared = TrafficRequest(33, 40, [1, 2, 70], 3)
    other = TrafficRequest(100, 1, [1, 2, 6, 7, 8, 9, 80], 7)
    found = with_answers([first, second, short, shared, other], 16)
    assert [(list(one.blocks), one.prompt_blocks) for one in found] == [
        ([1, 2, 3, 4], 2),
        ([1, 2, 3, 4, 5], 5),
        ([1, 2, 3, 4, 5], 5),
        ([1, 2], 2),
        ([1, 2, 6, 7, 8, 9], 6),
    ]
