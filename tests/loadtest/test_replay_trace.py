"""A replayed trace shares exactly the blocks of the trace."""

from __future__ import annotations

from loadtest.commands.mock_engine_command import mock_tokenizer
from loadtest.fleets.replay_trace import TraceProse, TraceRequest, due_times_s, ideal_of_trace


def request(tokens: int, *blocks: int, at_ms: float = 0.0) -> TraceRequest:
    return TraceRequest(at_ms, tokens, 10, list(blocks))


def test_prompts_have_the_traces_lengths_and_share_its_blocks() -> None:
    """Equal tokens as long as the ids are equal, different tokens right after."""
    tokenizer, prose = mock_tokenizer(), TraceProse()
    first, second = (tokenizer.encode(prose.prompt(one)) for one in (request(1300, 0, 1, 2), request(1100, 0, 1, 3)))
    assert (len(first), len(second)) == (1300, 1100)
    assert first[:1024] == second[:1024]
    assert first[1024:1040] != second[1024:1040]


def test_the_ideal_counts_leading_known_ids_but_never_the_last_token() -> None:
    """Whole router blocks; blocks after an unknown id do not count."""
    assert ideal_of_trace([request(1024, 0, 1)]) == 0
    assert ideal_of_trace([request(1024, 0, 1), request(1024, 0, 1)]) == 1008
    assert ideal_of_trace([request(1024, 0, 1), request(1536, 0, 9, 1)]) == 512


def test_arrivals_keep_the_traces_gaps_and_jitter_stays_within_its_bound() -> None:
    """Speed divides both; without jitter the gaps are exact."""
    trace = [request(10, 0, at_ms=ms) for ms in (5000.0, 5000.0, 11000.0)]
    assert due_times_s(trace, 2.0, 0.0) == [0.0, 0.0, 3.0]
    jittered = due_times_s(trace, 2.0, 3.0)
    assert all(0 <= late - due <= 1.5 for late, due in zip(jittered, [0.0, 0.0, 3.0], strict=True))
    assert jittered[0] != jittered[1]
