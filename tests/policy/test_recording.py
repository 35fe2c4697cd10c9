"""A recorded scene is decided again as it was, by every policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from msgspec import structs

from router.errors import RouterError
from router.policy.decide import decide
from router.policy.recording import (
    FleetLine,
    RecordedScene,
    SceneFacts,
    SceneLine,
    digest_of,
    fleet_digest,
    fleet_line,
    record,
    scene_line,
)
from router.policy.spec import Policy
from router.types import Congestion, InFlight, PodLoad, PodState, PodStatus, Scene, ScenePicture, StepBegan
from tests.kit.scenes import MODEL, POLICIES, pod, policy, prompt, ready, request, scene, scenes

ALL = [
    *POLICIES.values(),
    policy("queue", "prefill", "transfer", "handoff", "kv_wait", "decode_interference", shortlist=2),
]


def decided(seen: Scene, by: Policy) -> bytes:
    """The decision to the byte, or why there is none."""
    try:
        return msgspec.json.encode(decide(seen, by))
    except RouterError as error:
        return repr(error).encode()


def written(kept: RecordedScene) -> tuple[bytes, bytes]:
    """Both lines of it."""
    digest = fleet_digest(kept.fleet)
    lines = fleet_line(kept.fleet, digest, 0.0), scene_line(kept, digest)
    return msgspec.json.encode(lines[0]), msgspec.json.encode(lines[1])


def read(lines: tuple[bytes, bytes]) -> RecordedScene:
    fleet, line = lines
    return msgspec.json.decode(line, type=SceneLine).restored(msgspec.json.decode(fleet, type=FleetLine))


def served(seen: Scene) -> Scene:
    """The same where every pod may serve it: most scenes of the strategy are refused."""
    pods = tuple(
        replace(status, state=PodState.READY, pod=replace(status.pod, models=(MODEL,), max_model_len_tokens=None))
        for status in seen.fleet.pods
    )
    return structs.replace(seen, fleet=replace(seen.fleet, pods=pods))


@given(scenes() | scenes().map(served))
def test_a_recorded_scene_replays_to_the_identical_decision(seen: Scene) -> None:
    """By every policy, from memory and from its lines: the same candidates, prices, order and reason, to the byte."""
    kept = record(seen)
    again = read(written(kept))
    for by in ALL:
        assert decided(kept.scene(), by) == decided(again.scene(), by) == decided(seen, by)


ABC = ("pod-1", "pod-2", "pod-3")
DECODING = InFlight(9, context_tokens=90_000, decode_tokens=90_000)
STEPS = {"pod-1": StepBegan(6.999), "pod-2": StepBegan(6.990), "pod-3": StepBegan(6.995)}
TWENTY = ready(*(pod(f"pod-{number}") for number in range(20)))


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("random", scene(*TWENTY, request=request("some id"))),
        ("ring_bounded_load", scene(*TWENTY, request=request(session="some session"), prompt=None)),
        ("ring_bounded_load", scene(*TWENTY, shared_blocks=30)),
        ("cost_aware", scene(*TWENTY, shared_blocks=30)),
        ("round_robin", scene(*TWENTY, turn=13)),
        ("cost_aware", scene(*ready(pod("a"), pod("b", adapters=("lora",))), request=request(adapter="lora"))),
        ("cost_aware", scene(*TWENTY[:4], now_s=7.0, inflight={"pod-3": InFlight(1, 1, 9, 90.0, 9, 0, 0, 90.0, 6.95)})),
        ("cost_aware", scene(*TWENTY[:4], now_s=7.0, inflight=dict.fromkeys(ABC, DECODING), steps=STEPS)),
    ],
)
def test_what_decides_is_recorded(name: str, seen: Scene) -> None:
    """The request's id, session and adapter, the hash behind what traffic shares, the turn, the time."""
    again = read(written(record(seen)))
    assert decided(again.scene(), POLICIES[name]) == decided(seen, POLICIES[name])


def test_nothing_of_the_prompt_is_kept() -> None:
    """Neither text nor tokens; of its hashes one."""
    asked = request(body=b"the secret harbour", prompt={"prompt": "the secret harbour"})
    kept = record(scene(*ready(pod("a")), request=asked, prompt=prompt(1000)))
    assert b"harbour" not in b"".join(written(kept))
    assert kept.scene().request.body == b""
    with pytest.raises(IndexError, match="not recorded"):
        kept.scene().prompt.hashes[7]  # type: ignore[union-attr]


def test_every_fact_is_recorded_under_its_own_name() -> None:
    """Those of the request that are strings too, each of which could stand for another."""
    said = {name: name for name in ("name", "adapter", "session", "tenant")}
    asked = request("me", **said, stream=True, max_output_tokens=7)
    numbers: dict[str, Any] = {
        "turn": 3,
        "now_s": 4.0,
        "shared_blocks": 5,
        "congestion": Congestion(2.0, busy_shares={"a": 0.5}),
        "learnt_reuse": 0.75,
        "expected_output_tokens": 4000,
        "pictures": (ScenePicture(9, 4, ("a",)),),
    }
    kept = record(scene(*ready(pod("a")), request=asked, prompt=None, **numbers), "chat")
    facts = {name: getattr(kept, name) for name in (*said, "request_id", "model", "workload", "endpoint")}
    assert facts == {**said, "request_id": "me", "model": MODEL, "workload": "chat", "endpoint": asked.endpoint}
    assert (kept.stream, kept.max_output_tokens, kept.body_bytes) == (True, 7, 400)
    assert {name: getattr(kept, name) for name in numbers} == numbers
    assert kept.degraded is False
    of_prompt = {"prompt_tokens", "media_tokens", "block_size_tokens", "blocks", "key"}
    others = {"stream", "max_output_tokens", "body_bytes", "degraded"}
    assert {*facts, *numbers, *others, *of_prompt} == set(SceneFacts.__struct_fields__), "test every new fact above"


def test_a_prompt_that_was_not_read_keeps_its_length() -> None:
    """By which its tokens are guessed."""
    kept = record(scene(*ready(pod("a")), request=request(body=b"x" * 400), prompt=None))
    assert len(kept.scene().request.body) == 400


def test_a_fleet_is_named_by_its_facts_and_not_by_its_load() -> None:
    """Loads change many times a second; pods and links do not."""
    idle = scene(*ready(pod("a")))
    busy = replace(idle.fleet, version=9, pods=tuple(replace(s, load=PodLoad(7, 1, 0.5)) for s in idle.fleet.pods))
    assert fleet_digest(idle.fleet) == fleet_digest(busy)
    assert fleet_digest(idle.fleet) != fleet_digest(scene(*ready(pod("a"), pod("b"))).fleet)


def test_a_scene_is_named_by_everything_that_decides() -> None:
    """Another load is another scene; another order of its parts is not."""
    one = scene(*ready(pod("a"), pod("b")))
    digests = {
        digest_of(scene_line(record(each), fleet_digest(each.fleet)))
        for each in (
            one,
            structs.replace(one, match=structs.replace(one.match, blocks={"a": (1, 0, 0, 0), "b": (2, 0, 0, 0)})),
            structs.replace(one, match=structs.replace(one.match, blocks={"b": (2, 0, 0, 0), "a": (1, 0, 0, 0)})),
        )
    }
    assert len(digests) == 2


def test_what_was_ours_in_a_queue_is_part_of_the_scene() -> None:
    """A replay counts the same requests of another origin."""
    seen = scene(PodStatus(pod("a"), PodState.READY, PodLoad(waiting=3, our_prompts=2)))
    assert read(written(record(seen))).fleet.pods[0].load.foreign_waiting == 1


def test_another_fleet_is_refused() -> None:
    """Loads of two pods are not those of one."""
    _, line = written(record(scene(*ready(pod("a"), pod("b")))))
    fleet, _ = written(record(scene(*ready(pod("a")))))
    with pytest.raises(ValueError, match="argument"):
        read((fleet, line))


@pytest.mark.parametrize("wrong", [{"body_bytes": 1 << 50}, {"block_size_tokens": 0}, {"blocks": -1}])
def test_a_line_that_no_router_wrote_is_refused(wrong: dict[str, int]) -> None:
    """Before anything is made of it."""
    _, line = written(record(scene(*ready(pod("a")))))
    data = msgspec.json.decode(line) | wrong
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(data), type=SceneLine)
