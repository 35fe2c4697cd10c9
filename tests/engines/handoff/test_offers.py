"""Transfer parameters never reach a client."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.engines.handoff import offers
from router.engines.handoff.offers import OFFER, OfferFilter, without_offers

VECTORS = Path(__file__).parents[4] / "shared" / "data" / "next_turn_vectors.json"
FIELD = "kv_transfer_params"
PARAMS = {"remote_host": 'h"{', "remote_block_ids": [[1, 2], [3]], "x": {"y": {"}": None}}}
TRICKY = json.dumps({FIELD: PARAMS}) + ' "' + FIELD + '": {"a":1},'


def shown(text: bytes, *, stream: bool = False, cuts: list[int] | None = None) -> tuple[bytes, list[Any]]:
    """What the client gets, and the offers."""
    places, found = [0, *sorted(min(cut, len(text)) for cut in cuts or []), len(text)], list[Any]()
    one = OfferFilter(
        stream, lambda offer: found.append({name: json.loads(bytes(value)) for name, value in offer.items()})
    )
    out = [one.feed(text[start:end]) for start, end in pairwise(places)]
    return b"".join([*out, one.end()]), found


@pytest.mark.skipif(not VECTORS.exists(), reason="needs the recorded answers")
@pytest.mark.parametrize("release", ["0.32", "0.33"])
def test_recorded_answers_lose_the_field_and_nothing_else(release: str) -> None:
    """Whole ones and streams, whose finishing chunk has an offer from 0.33 on, and whose others have null."""
    recorded = json.loads(VECTORS.read_text())["bytes"][release]
    for name in ("decode_chat_unary", "decode_completion_unary"):
        expected = json.loads(recorded[name])
        offer = expected.pop(FIELD)
        text, found = shown(recorded[name].encode())
        assert (json.loads(text), found) == (expected, [offer])
    for name in ("decode_chat_stream_end", "decode_completion_stream_end"):
        text, found = shown("\n\n".join(recorded[name]).encode(), stream=True)
        assert FIELD.encode() not in text
        assert len(found) == (release == "0.33")
        events = [json.loads(event.removeprefix("data: ")) for event in recorded[name] if "{" in event]
        expected = [{key: value for key, value in event.items() if key != FIELD} for event in events]
        assert [json.loads(line[6:]) for line in text.split(b"\n\n") if b"{" in line] == expected


@pytest.mark.parametrize("value", [PARAMS, None, "x", 3, {}])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_field_goes_from_any_place_and_depth(value: Any, place: int) -> None:
    """First, last and between others; also in the whole response that an event of `/v1/responses` has. A text that
    looks like it stays."""
    fields = [("id", TRICKY), ("usage", {"a": 1})]
    expected = dict(fields)
    fields.insert(place, (FIELD, value))
    event = {"type": "response.completed", "response": dict(fields)}
    assert json.loads(without_offers(json.dumps(event).encode())) == {**event, "response": expected}
    assert json.loads(without_offers(json.dumps(dict(fields)).encode())) == expected
    assert without_offers(json.dumps({FIELD: value}).encode()) == b"{}"


@given(st.lists(st.integers(0, 400), max_size=12), st.booleans())
def test_the_division_into_chunks_makes_no_difference(cuts: list[int], stream: bool) -> None:
    event = json.dumps({"id": TRICKY, FIELD: PARAMS, "n": 1})
    text = f"data: {event}\n\ndata: [DONE]\n\n" if stream else event
    rest = json.dumps({"id": TRICKY, "n": 1})
    expected = f"data: {rest}\n\ndata: [DONE]\n\n" if stream else rest
    assert shown(text.encode(), stream=stream, cuts=cuts) == (expected.encode(), [PARAMS])


def test_a_response_without_the_field_keeps_its_bytes() -> None:
    text = json.dumps({"id": TRICKY}, indent=1).encode()
    assert shown(text) == (text, [])


def test_a_long_response_is_sent_before_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its last bytes are held, in which an offer may begin."""
    monkeypatch.setattr(offers, "MAX_HELD_BYTES", 2 * OFFER.max_bytes)
    text = json.dumps({"text": "x" * 5 * OFFER.max_bytes, FIELD: PARAMS, "n": 1}).encode()
    one, out = OfferFilter(stream=False), list[bytes]()
    for start in range(0, len(text), 1000):
        out.append(one.feed(text[start : start + 1000]))
    assert sum(map(len, out)) > 3 * OFFER.max_bytes
    assert json.loads(b"".join([*out, one.end()])) == {"text": "x" * 5 * OFFER.max_bytes, "n": 1}


@pytest.mark.parametrize("stream", [False, True])
def test_an_offer_of_a_million_tokens_reaches_nobody_and_is_given_back(stream: bool) -> None:
    """It is longer than what is held of other responses."""
    offer = {"remote_block_ids": [[*range(100_000, 162_500)]]}
    text = json.dumps({"text": "x" * offers.MAX_HELD_BYTES, FIELD: offer, "n": 1}, separators=(",", ":")).encode()
    cuts = [*range(0, len(text), 65_536)]
    expected = {"text": "x" * offers.MAX_HELD_BYTES, "n": 1}
    left, found = shown(text, stream=stream, cuts=cuts)
    assert (json.loads(left), found) == (expected, [offer])


def test_an_offer_that_is_too_large_is_not_used_and_nothing_of_it_is_sent() -> None:
    huge = json.dumps({FIELD: {"x": "y" * 2 * OFFER.max_bytes}, "n": 1}).encode()
    assert shown(huge) == (b'{ "n": 1}', [])
    text, found = shown(b'{"a":1,' + huge[1:], cuts=[*range(0, len(huge), 10_000)])
    assert (b"y" in text, found) == (False, [])


def test_no_part_of_an_offer_passes_where_others_in_front_of_it_were_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left without those is shorter than an offer may be."""
    monkeypatch.setattr(offers, "MAX_HELD_BYTES", 2 * OFFER.max_bytes)
    offer = {FIELD: {"x": "y" * 20_000}}
    text = json.dumps({FIELD: {"x": "y" * 2 * OFFER.max_bytes}, "n": "z" * 50_000, "o": offer}).encode()
    one = OfferFilter(stream=False)
    assert one.feed(text[:-10_000]) + one.feed(text[-10_000:]) + one.end() == b'{ "n": "%b", "o": {}}' % (b"z" * 50_000)


def test_white_space_around_parameters_costs_no_more_than_other_bytes() -> None:
    """Quadratic time would be hours here."""
    space = b" " * 1_000_000
    assert without_offers(b'{"kv_transfer_params":1,"a":' + space + b"1}") == b'{"a":' + space + b"1}"
    assert without_offers(b'{"a":1,' + space + b'"kv_transfer_params"' + space + b":" + space + b"null}") == b'{"a":1}'
