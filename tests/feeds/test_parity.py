"""Evaluation of the parity self-test."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.feeds.parity import (
    PROBE_BLOCKS,
    Parity,
    ParityReport,
    compare_hashes,
    compare_tokens,
    expected_blocks,
    probes,
)
from router.types import Endpoint, Generation, PrefixTrust, PromptPrefix

TOKENS = list(range(100, 200))
AGREED = ParityReport(Parity.OK, Parity.UNKNOWN, "tokens agree")


def prompt(tokens: int, block_size_tokens: int = 16) -> PromptPrefix:
    return PromptPrefix(Generation(model="m", block_size_tokens=block_size_tokens), range(tokens), ())


@pytest.mark.parametrize("block_tokens", [16, 256, None])
def test_probes_are_unique_long_and_of_several_kinds(block_tokens: int | None) -> None:
    """A chat with a system message, one without, a completion; each starts with the nonce and is longer than three
    engine blocks."""
    tried = list(probes("m", "NONCE", block_tokens))
    assert [endpoint for endpoint, _ in tried] == [Endpoint.CHAT, Endpoint.CHAT, Endpoint.COMPLETIONS]
    assert [message["role"] for message in tried[0][1]["messages"]] == ["system", "user", "assistant", "user"]
    assert [message["role"] for message in tried[1][1]["messages"]] == ["user", "assistant", "user"]
    for _, body in tried:
        text = body["prompt"] if "prompt" in body else " ".join(m["content"] for m in body["messages"])
        assert text.startswith("NONCE")
        assert len(text.split()) > (PROBE_BLOCKS - 1) * (block_tokens or 16)
        assert any(ord(character) > 0xFFFF for character in text)
        assert (body["model"], body["max_tokens"]) == ("m", 1)


def test_equal_tokens_pass() -> None:
    """For any kind of sequence."""
    assert compare_tokens(TOKENS, tuple(TOKENS), None).tokens is Parity.OK


def test_a_mismatch_names_the_first_different_token() -> None:
    """With its index, both neighbourhoods, both lengths and what to do."""
    engine = [*TOKENS[:50], 7, *TOKENS[50:]]
    report = compare_tokens(TOKENS, engine, 101)
    assert report.trust is PrefixTrust.MISMATCH
    assert "token 50 differs" in report.reason
    assert "[146, 147, 148, 149, 150, 151, 152, 153, 154]... (100 in all)" in report.reason
    assert "[146, 147, 148, 149, 7, 150, 151, 152, 153]... (101 in all)" in report.reason
    assert "chat template" in report.reason


@pytest.mark.parametrize("engine", [TOKENS[:-1], [*TOKENS, 5], []])
def test_a_prefix_of_the_tokens_is_a_mismatch(engine: list[int]) -> None:
    """The lengths differ."""
    report = compare_tokens(TOKENS, engine, None)
    assert report.tokens is Parity.MISMATCH
    assert f"token {min(len(engine), len(TOKENS))} differs" in report.reason


@settings(max_examples=50)
@given(ours=st.lists(st.integers(0, 9), max_size=12), engine=st.lists(st.integers(0, 9), max_size=12))
def test_tokens_pass_exactly_if_they_are_equal(ours: list[int], engine: list[int]) -> None:
    """For all pairs of sequences."""
    assert (compare_tokens(ours, engine, None).tokens is Parity.OK) == (ours == engine)


def test_the_number_of_tokens_is_compared_if_tokens_are_unknown() -> None:
    """Equal, different, or unknown as well."""
    assert compare_tokens(TOKENS, None, 100).tokens is Parity.OK
    assert compare_tokens(TOKENS, None, 99).tokens is Parity.MISMATCH
    assert compare_tokens(TOKENS, None, None).tokens is Parity.UNKNOWN


@pytest.mark.parametrize(
    ("tokens", "engine_block", "blocks"),
    [(100, 16, 6), (100, 32, 6), (95, 32, 4), (96, 32, 6), (31, 32, 0), (100, None, 6), (112, 24, 6)],
)
def test_an_engine_announces_its_full_blocks(tokens: int, engine_block: int | None, blocks: int) -> None:
    """Counted in router blocks of 16."""
    assert expected_blocks(prompt(tokens), engine_block) == blocks


def test_equal_hashes_prove_equal_tokens() -> None:
    """Even of an engine that does not report its tokens."""
    silent = compare_tokens(TOKENS, None, None)
    report = compare_hashes(silent, 6, 6, "")
    assert (report.tokens, report.hashes, report.trust) == (Parity.UNKNOWN, Parity.OK, PrefixTrust.TRUSTED)


@pytest.mark.parametrize(
    ("known", "rejected", "why"),
    [
        (0, "", "reach the pod's KV event endpoint"),
        (5, "", "only 5 of 6 blocks of the probe"),
        (6, "no multiple", "no multiple"),
    ],
)
def test_missing_blocks_are_explained(known: int, rejected: str, why: str) -> None:
    """None arrived, some arrived, or none can be indexed."""
    report = compare_hashes(AGREED, known, 6, rejected)
    assert report.trust is PrefixTrust.MISMATCH
    assert why in report.reason


@pytest.mark.parametrize(
    ("tokens", "hashes", "trust"),
    [
        (Parity.OK, Parity.OK, PrefixTrust.TRUSTED),
        (Parity.OK, Parity.NO_EVENTS, PrefixTrust.TRUSTED),
        (Parity.OK, Parity.UNKNOWN, PrefixTrust.UNTESTED),
        (Parity.UNKNOWN, Parity.NO_EVENTS, PrefixTrust.UNTESTED),
        (Parity.UNKNOWN, Parity.UNKNOWN, PrefixTrust.UNTESTED),
        (Parity.MISMATCH, Parity.UNKNOWN, PrefixTrust.MISMATCH),
        (Parity.OK, Parity.MISMATCH, PrefixTrust.MISMATCH),
    ],
)
def test_trust_requires_proof(tokens: Parity, hashes: Parity, trust: PrefixTrust) -> None:
    """Any mismatch is a mismatch; without proof a pod stays untested."""
    assert ParityReport(tokens, hashes, "").trust is trust
