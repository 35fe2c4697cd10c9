"""Pods, fleets, and scenes to decide in: small ones by hand, and a hypothesis strategy for any scene."""

from __future__ import annotations

from functools import partial
from typing import Any

from hypothesis import strategies as st
from msgspec import structs

from loadtest.simulated_peers.peer_pickers import policies_with_peers
from router.fleet.fleet import Fleet, PodEvent
from router.hashing import generation_seed, hash_blocks, token_array
from router.policy.spec import Policy, parse_policy
from router.types import (
    BlocksByTier,
    Congestion,
    Endpoint,
    FleetSnapshot,
    Generation,
    InferenceRequest,
    InFlight,
    Link,
    Links,
    Pod,
    PodLoad,
    PodSpeed,
    PodState,
    PodStatus,
    PrefixMatch,
    PrefixTrust,
    PromptPrefix,
    Role,
    Scene,
    ScenePicture,
    StepBegan,
)

MODEL = "m"
BLOCK = 16
POLICIES = policies_with_peers()


SPEED = PodSpeed(1.0, 0.02, 4e-7, 6.0, 0.01, 4e-5)
LLAMA_8B = PodSpeed(0.8, 0.0203, 4.01e-7, 6.3, 0.01, 4.2e-5)
"""On one H100."""
LLAMA_70B = PodSpeed(3.755, 0.06176, 5.004e-7, 15.18, 0.03277, 2.652e-5)


def make_pod(name: str = "a", **facts: Any) -> Pod:
    """A vLLM pod on the host of its name, with these facts."""
    usual: dict[str, Any] = {"url": f"http://{name}", "engine": "vllm", "speed": SPEED}
    return Pod(id=name, **(usual | facts))


pod = partial(make_pod, models=(MODEL,), trust=PrefixTrust.TRUSTED)


def ready(*pods: Pod) -> tuple[PodStatus, ...]:
    return tuple(PodStatus(each, PodState.READY) for each in pods)


def snapshot_of(*pods: Pod) -> FleetSnapshot:
    """These pods, all of them ready."""
    return FleetSnapshot(1, ready(*pods))


def fleet_of(*pods: Pod) -> Fleet:
    """These pods, all of them ready."""
    fleet = Fleet()
    fleet.sync(pods)
    for each in pods:
        fleet.event(each.id, PodEvent.PROBE_OK)
    return fleet


def policy(*costs: str, **facts: Any) -> Policy:
    """The cheapest by these terms with their defaults, or by `costs` as a file would say them."""
    usual: dict[str, Any] = {"name": "mine", "about": "", "costs": {name: {} for name in costs}}
    return parse_policy(usual | {"picker": {"lowest_cost": {}}} | facts)


def prompt_of(tokens: list[int]) -> PromptPrefix:
    generation = Generation(model=MODEL, block_size_tokens=BLOCK)
    flat = token_array(tokens)
    return PromptPrefix(generation, flat, hash_blocks(flat, BLOCK, generation_seed(generation)))


def prompt(token_count: int, salt: int = 0) -> PromptPrefix:
    """A prompt of that length; another salt shares nothing with it."""
    return prompt_of([salt + number for number in range(token_count)])


def request(request_id: str = "r", /, **facts: Any) -> InferenceRequest:
    usual: dict[str, Any] = {"endpoint": Endpoint.CHAT, "model": MODEL, "body": b"x" * 400}
    return InferenceRequest(id=request_id, **(usual | facts))


def scene(*statuses: PodStatus, links: Links | None = None, **facts: Any) -> Scene:
    usual: dict[str, Any] = {
        "request": request(),
        "prompt": prompt(1000),
        "match": PrefixMatch(),
        "inflight": {},
        "now_s": 0.0,
    }
    by_id = tuple(sorted(statuses, key=lambda status: status.pod.id))
    return Scene(fleet=FleetSnapshot(1, by_id, links or Links()), **(usual | facts))


def holding(seen: Scene, pod_id: str, blocks: int) -> Scene:
    """The same scene, with `pod_id` holding that many blocks."""
    return structs.replace(seen, match=PrefixMatch({**seen.match.blocks, pod_id: (blocks, 0, 0, 0)}))


speeds = st.builds(
    PodSpeed,
    st.floats(0, 50),
    st.floats(0.001, 0.2),
    st.floats(0, 5e-6),
    st.floats(0, 20),
    st.floats(0, 0.2),
    st.floats(0, 1e-4),
)
works = st.builds(
    lambda decoding, prefilling, tokens, ms, context, pulls, decoded, head, since_s: InFlight(
        *(decoding + prefilling, prefilling, tokens, ms if prefilling else 0.0, context + decoded, pulls, decoded),
        *((ms * head, since_s) if prefilling else ()),
    ),
    st.integers(0, 40),
    st.integers(0, 10),
    st.integers(0, 50_000),
    st.floats(0, 5_000),
    st.integers(0, 500_000),
    st.integers(0, 3),
    st.integers(0, 300_000),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.floats(-1, 0),
)
busy_shares = st.dictionaries(st.integers(0, 5).map("pod-{}".format), st.floats(0, 1))
congestions = st.builds(Congestion, st.floats(0, 50), st.floats(0, 1), st.floats(0, 1e5), busy_shares)
pictures = st.just(()) | st.lists(
    st.builds(
        ScenePicture, st.none() | st.integers(1, 900), st.integers(1, 900), st.just(()) | st.just(("pod-0", "pod-2"))
    ),
    max_size=3,
).map(tuple)
links = st.builds(Link, st.floats(0, 30), st.floats(1e3, 1e6))


@st.composite
def statuses(draw: st.DrawFn, name: str) -> PodStatus:
    facts = pod(
        name,
        speed=draw(speeds),
        role=draw(st.sampled_from(Role)),
        models=draw(st.sampled_from([(MODEL,), (MODEL, "other"), ("other",)])),
        max_model_len_tokens=draw(st.none() | st.integers(1, 3000)),
        block_size_tokens=draw(st.sampled_from([None, 16, 32, 64])),
        trust=draw(st.sampled_from(PrefixTrust)),
        kv_bytes_per_token=draw(st.sampled_from([0, 1000])),
        handoff=draw(st.sampled_from(["", "nixl"])),
        pulls=draw(st.sampled_from(["", "nixl"])),
        capacity_tokens=draw(st.sampled_from([None, 640, 6400])),
        ready_since_s=draw(st.none() | st.floats(-12, 1)),
    )
    state = draw(st.sampled_from([PodState.READY, *PodState]))
    counts = st.integers(0, 50)
    load = PodLoad(draw(counts), draw(counts), draw(st.floats(0, 1)), 1.0, draw(counts))
    return PodStatus(facts, state, load)


@st.composite
def held_by_tier(draw: st.DrawFn, blocks: int) -> BlocksByTier:
    """At most `blocks` blocks, in half of the cases all of them on the GPU."""
    total = draw(st.integers(0, blocks))
    outside = draw(st.integers(0, total)) if draw(st.booleans()) else 0
    return total - outside, outside // 2, outside // 4, outside - outside // 2 - outside // 4


@st.composite
def scenes(draw: st.DrawFn, linked: bool = True) -> Scene:
    """Any fleet, prompt, match, load and turn; often one in which nothing can be served. KV moves only where linked."""
    names = [f"pod-{number}" for number in range(draw(st.integers(0, 6)))]
    fleet = tuple(draw(statuses(name)) for name in names)
    tokens = draw(st.none() | st.integers(0, 2000))
    asked = None if tokens is None else prompt(tokens, draw(st.integers(0, 3)) * 100_000)
    blocks = len(asked.hashes) if asked else 0
    held = {name: draw(held_by_tier(blocks)) for name in names if draw(st.booleans())}
    return scene(
        *fleet,
        links=Links(elsewhere=draw(st.none() | links)) if linked else None,
        request=request(
            draw(st.text(min_size=1, max_size=8)),
            session=draw(st.sampled_from(["", "s1", "s2"])),
            tenant=draw(st.sampled_from(["", "t1", "t2"])),
            max_output_tokens=draw(st.none() | st.integers(1, 2000)),
        ),
        prompt=asked,
        match=PrefixMatch(held),
        inflight={name: draw(works) for name in names if draw(st.booleans())},
        steps={name: StepBegan(draw(st.floats(-1, 0)), draw(st.floats(0, 500))) for name in names[::2]},
        turn=draw(st.integers(0, 100)),
        shared_blocks=draw(st.integers(0, blocks + 2)),
        congestion=draw(congestions),
        pictures=draw(pictures),
        learnt_reuse=draw(st.floats(0, 16)),
    )
