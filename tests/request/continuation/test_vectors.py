"""Each recorded stream of a real vLLM, cut where it was cut then, goes on with what the real second pod sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.request.continuation.joiner import Joiner
from router.request.continuation.plan import Continue, plan
from router.request.continuation.stream import Recorder
from router.request.continuation.terms import terms_of
from router.types import Endpoint
from tests.request.continuation.recorded import CASES, DONE, Case, Received, body_of, stream, words

ONE_CHOICE = [case for case in CASES if case["request"].get("n", 1) == 1]
CUTS = [(case, cut) for case in ONE_CHOICE for cut in case["cuts"]]
SECOND = {"id": "chatcmpl-2", "created": 99}


def recorder_of(case: Case) -> Recorder:
    return Recorder(terms_of(Endpoint.CHAT, body_of(case)), asks_ids=True)


def fed(reader: Any, pieces: list[bytes]) -> bytes:
    return b"".join(map(reader.feed, pieces))


def uncut(case: Case) -> list[bytes]:
    return [*stream(case["uncut"], case["prompt_ids"]), DONE]


def without_ids(case: Case) -> list[bytes]:
    """The same stream of a pod that was not asked for ids."""
    hidden = case["request"].get("include_reasoning") is False
    shown = []
    for one in case["uncut"]:
        one = {name: value for name, value in one.items() if name != "t"}
        if hidden and "d" in one:
            one["d"] = {name: value for name, value in one["d"].items() if name != "reasoning"}
        if one.get("d") != {} or one.get("f") or one.get("l"):
            shown.append(one)
    return [*stream(shown, None), DONE]


@pytest.mark.parametrize("case", ONE_CHOICE, ids=lambda case: case["name"])
def test_client_gets_the_bytes_of_a_stream_without_ids(case: Case) -> None:
    recorder = recorder_of(case)
    assert fed(recorder, uncut(case)) == b"".join(without_ids(case))
    assert recorder.record.is_done and not recorder.fault
    assert len(recorder.current.ids) == case["usage"]["completion_tokens"] if case["usage"] else recorder.current.ids


@pytest.mark.parametrize(("case", "cut"), CUTS, ids=lambda one: one.get("name", one.get("events")))
def test_joined_stream_is_the_uncut_one(case: Case, cut: dict[str, Any]) -> None:
    recorder = recorder_of(case)
    received = fed(recorder, uncut(case)[: cut["events"]])
    found = plan(recorder.terms, recorder.current, body_of(case), words())
    if "refused" in cut:
        assert isinstance(found, str)
        return
    (choice,) = cut["choices"]
    assert isinstance(found, Continue), found
    if found.method == "retry":  # the client has nothing: the recorded prototype kept what it did not have
        choice = {"second": case["uncut"], "asked": case["asked"]}
    else:
        assert (found.seam.kept, found.seam.held) == (choice["kept"], choice.get("held", ""))
    asked = json.loads(found.body)
    assert {name: asked[name] for name in choice["asked"]} == choice["asked"]
    joiner = Joiner(recorder.terms, recorder.current, found, words())
    given = [*found.prompt, *recorder.current.ids[: found.seam.kept]]
    received += fed(joiner, [*stream(choice["second"], given, **SECOND), DONE])
    assert not joiner.fault
    assert Received(received).whole == Received(b"".join(without_ids(case))).whole
