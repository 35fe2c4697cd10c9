"""What two recorded exchanges of the same request have to have in common: all but ids and times."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from itertools import product, zip_longest

from tests.live_clients.recording_proxy import Exchange

_IDS = "id|item_id|request_id|response_id|call_id|tool_call_id|system_fingerprint|signature|encrypted_content"
_MASKS = [
    (re.compile(rf'"({_IDS})":\s*"[^"]*"'.encode()), rb'"\1":"*"'),
    (re.compile(rb'"(created|created_at|completed_at)":\s*[0-9.]+'), rb'"\1":0'),
]
_CHOICE = re.compile(rb'"choices":\[\{"index":(\d+),')
_SECOND = re.compile(rb'"choices":\[\{"index":1,')
MAY_DIFFER = frozenset({"date", "server", "x-request-id", "connection", "keep-alive"})
"""Headers of the connection and of the request, not of the answer."""
_OWN = "x-warmroute-"
SHOWN_CHARACTERS = 300


def masked(body: bytes) -> bytes:
    """A body without ids and times. The names of their fields stay. Of a stream with several choices, one comes after
    the other: vLLM sends the next piece of any of them as soon as it has it."""
    for pattern, mask in _MASKS:
        body = pattern.sub(mask, body)
    if not body.startswith(b"data: ") or not _SECOND.search(body):
        return body
    events = sorted(body.split(b"\n\n"), key=_choice)
    return b"\n\n".join(events)


def _choice(event: bytes) -> int:
    found = _CHOICE.search(event)
    return int(found[1]) if found else sys.maxsize


def shown_headers(exchange: Exchange) -> set[tuple[str, str]]:
    """Headers that belong to the answer. The length of a body with ids of another length is another one."""
    is_masked = masked(exchange.body) != exchange.body
    hidden = MAY_DIFFER | ({"content-length"} if is_masked else set())
    return {(name, value) for name, value in exchange.headers if name not in hidden and not name.startswith(_OWN)}


def difference(direct: Exchange, routed: Exchange) -> str:
    """The first difference of two responses; "" for none."""
    if (direct.asked, direct.status) != (routed.asked, routed.status):
        return f"{direct.asked} {direct.status}, routed {routed.asked} {routed.status} {_cut(routed.body)}"
    one, other = masked(direct.body), masked(routed.body)
    if one != other:
        return _first_event(one, other)
    is_of_pod = any(name == f"{_OWN}pod" for name, _ in routed.headers)  # else the router has answered by itself
    if is_of_pod and (headers := shown_headers(direct) ^ shown_headers(routed)):
        return f"headers: {sorted(headers)}"
    return ""


def differences(direct: Sequence[Sequence[Exchange]], routed: Sequence[Sequence[Exchange]]) -> list[str]:
    """One text for each request of which no direct response equals a routed one, in runs of one program: vLLM sends two
    tokens as one piece where its engine is faster than its server, so that two direct responses may differ, too."""
    if len(counts := {len(run) for run in (*direct, *routed)}) != 1:
        return [f"the runs have {sorted(counts)} requests"]
    found = []
    for ones, others in zip(zip(*direct, strict=True), zip(*routed, strict=True), strict=True):
        all_pairs = [difference(one, other) for one, other in product(ones, others)]
        if all(all_pairs):
            found.append(f"{ones[0].asked} {_cut(ones[0].asked_body)}\n    {all_pairs[-1]}")
    return found


def _first_event(one: bytes, other: bytes) -> str:
    """The first event, or part of a body, that differs."""
    pairs = zip_longest(one.split(b"\n\n"), other.split(b"\n\n"), fillvalue=b"(nothing)")
    place, (sent, got) = next((place, pair) for place, pair in enumerate(pairs) if pair[0] != pair[1])
    return f"event {place}: directly {_cut(sent)}\n    routed {_cut(got)}"


def _cut(text: bytes) -> str:
    shown, half = text.decode("utf-8", "replace"), SHOWN_CHARACTERS // 2
    return shown if len(shown) <= SHOWN_CHARACTERS else f"{shown[:half]} ... {shown[-half:]}"
