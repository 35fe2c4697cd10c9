"""Records a scene so that it can be decided again.

Kept are lengths, one block hash, held blocks, the fleet and its load; never a token or text of the prompt. In memory a
recorded scene refers to the values that were decided on. Serialized it is two kinds of lines: a fleet is written once
for many scenes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import xxhash

from router.policy.plans import BYTES_PER_TOKEN, unread_tokens
from router.policy.ring import key_block
from router.types import (
    PRIOR_OUTPUT_TOKENS,
    BlockHash,
    BlocksByTier,
    Congestion,
    FleetSnapshot,
    Generation,
    InferenceRequest,
    InFlight,
    Links,
    Pod,
    PodId,
    PodLoad,
    PodState,
    PodStatus,
    PrefixMatch,
    PromptPrefix,
    RequestInputs,
    Scene,
    ScenePicture,
    StepBegan,
)

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
BodyBytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]
"""Bounded, because a body of this length is restored."""
LoadRow: TypeAlias = tuple[int, int, float, int]
"""The fields of `PodLoad` that policies read: running, waiting, kv_usage and our_prompts."""


class SceneFacts(RequestInputs, frozen=True, gc=False):
    """What policies read of a request and its prompt. Headers are not kept."""

    request_id: str = ""
    workload: str = ""
    """The request's class, for the `match` of a policy."""
    body_bytes: BodyBytes = 0
    """Length of a body with as many assumed tokens if the prompt's are unknown, else 0."""
    prompt_tokens: _Count | None = None
    media_tokens: _Count = 0
    """Further tokens of its pictures, estimated."""
    block_size_tokens: Annotated[int, msgspec.Meta(ge=1)] = 1
    blocks: _Count = 0
    """Full blocks of the prompt."""
    key: BlockHash = 0
    """Hash of the block `ring.key_block`."""
    shared_blocks: _Count = 0
    turn: _Count = 0
    now_s: float = 0.0
    degraded: bool = False
    congestion: Congestion = Congestion()
    pictures: tuple[ScenePicture, ...] = ()
    learnt_reuse: float = 0.0
    expected_output_tokens: _Count = PRIOR_OUTPUT_TOKENS


class RecordedScene(SceneFacts, frozen=True, kw_only=True, gc=False):
    """A scene without its prompt and body."""

    match: Mapping[PodId, BlocksByTier]
    inflight: Mapping[PodId, InFlight]
    steps: Mapping[PodId, StepBegan]
    fleet: FleetSnapshot

    def scene(self) -> Scene:
        """A scene in which every policy decides as in the original."""
        return Scene(
            request=InferenceRequest(
                id=self.request_id,
                body=bytes(self.body_bytes),
                **{name: getattr(self, name) for name in RequestInputs.__struct_fields__},
            ),
            prompt=self._prompt(),
            match=PrefixMatch(self.match, degraded=self.degraded),
            **{name: getattr(self, name) for name in _OF_SCENE},
        )

    def _prompt(self) -> PromptPrefix | None:
        if self.prompt_tokens is None:
            return None
        generation = Generation(model=self.model, block_size_tokens=self.block_size_tokens)
        hashes = _OneHash(self.blocks, key_block(self.blocks, self.shared_blocks), self.key)
        return PromptPrefix(generation, range(self.prompt_tokens), hashes, self.media_tokens)


_OF_SCENE = set(Scene.__struct_fields__).intersection(RecordedScene.__struct_fields__) - {"match"}


class _OneHash(Sequence[BlockHash]):
    """The hashes of a prompt, of which only that of the affinity key was recorded. Reading another one raises
    `IndexError`."""

    def __init__(self, count: int, at: int, key: BlockHash) -> None:
        self._count, self._at, self._key = count, at, key

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: Any) -> Any:
        if at != self._at:
            raise IndexError(f"the hash of block {at} was not recorded")
        return self._key


def record(scene: Scene, workload: str = "") -> RecordedScene:
    """The scene as it is kept; `workload` is its class. O(1): nothing is copied, since all of it is immutable."""
    request, prompt, match = scene.request, scene.prompt, scene.match
    blocks = len(prompt.hashes) if prompt else 0
    return RecordedScene(  # facts in the order of `SceneFacts`: keywords take several times as long
        request.endpoint,
        request.model,
        request.adapter,
        request.session,
        request.tenant,
        request.stream,
        request.max_output_tokens,
        request.name,
        request.id,
        workload,
        0 if prompt else unread_tokens(request) * BYTES_PER_TOKEN,
        len(prompt.tokens) if prompt else None,
        prompt.media_tokens if prompt else 0,
        prompt.generation.block_size_tokens if prompt else 1,
        blocks,
        prompt.hashes[key_block(blocks, scene.shared_blocks)] if prompt and blocks else 0,
        scene.shared_blocks,
        scene.turn,
        scene.now_s,
        match.degraded,
        scene.congestion,
        scene.pictures,
        scene.learnt_reuse,
        scene.expected_output_tokens,
        match=match.blocks,
        inflight=scene.inflight,
        steps=scene.steps,
        fleet=scene.fleet,
    )


# --- lines ---


class FleetLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="fleet"):
    """Pods, their states and links. `fleet` is the digest of these facts, by which scenes refer to them; loads are part
    of the scene, since they change often. `at_s` is the wall-clock time of writing."""

    at_s: float
    version: Literal[1] = 1
    fleet: str
    pods: tuple[tuple[Pod, PodState], ...]
    links: Links

    def snapshot(self, loads: Sequence[LoadRow]) -> FleetSnapshot:
        """The fleet with these loads. Raises `ValueError` if their number is not that of its pods."""
        rows = (
            PodStatus(pod, state, PodLoad(running, waiting, kv_usage, our_prompts=our_prompts))
            for (pod, state), (running, waiting, kv_usage, our_prompts) in zip(self.pods, loads, strict=True)
        )
        return FleetSnapshot(0, tuple(rows), self.links)


class SceneLine(SceneFacts, frozen=True, kw_only=True, omit_defaults=True):
    """A recorded scene with the digest of its fleet. `loads` are in the order of the fleet's pods."""

    fleet: str
    match: dict[PodId, BlocksByTier] = msgspec.field(default_factory=dict)
    inflight: dict[PodId, InFlight] = msgspec.field(default_factory=dict)
    steps: dict[PodId, StepBegan] = msgspec.field(default_factory=dict)
    loads: tuple[LoadRow, ...] = ()

    def restored(self, fleet: FleetLine) -> RecordedScene:
        """The recorded scene. Raises `ValueError` for another fleet."""
        return RecordedScene(
            **_facts(self),
            match=self.match,
            inflight=self.inflight,
            steps=self.steps,
            fleet=fleet.snapshot(self.loads),
        )


def fleet_digest(fleet: FleetSnapshot) -> str:
    """Equal for fleets with equal pods, states and links. O(pods)."""
    return digest_of((_pods(fleet), fleet.links))


def fleet_line(fleet: FleetSnapshot, digest: str, at_s: float) -> FleetLine:
    return FleetLine(at_s=at_s, fleet=digest, pods=_pods(fleet), links=fleet.links)


def scene_line(scene: RecordedScene, fleet: str) -> SceneLine:
    """The scene as a line with its fleet's digest. O(pods)."""
    return SceneLine(
        **_facts(scene),
        fleet=fleet,
        match=dict(scene.match),
        inflight=dict(scene.inflight),
        steps=dict(scene.steps),
        loads=tuple(
            (load.running, load.waiting, load.kv_usage, load.our_prompts)
            for load in (status.load for status in scene.fleet.pods)
        ),
    )


def _facts(scene: SceneFacts) -> dict[str, Any]:
    return {name: getattr(scene, name) for name in SceneFacts.__struct_fields__}


def _pods(fleet: FleetSnapshot) -> tuple[tuple[Pod, PodState], ...]:
    return tuple((status.pod, status.state) for status in fleet.pods)


def digest_of(value: object) -> str:
    """Equal for equal values, such as the lines of scenes in which every policy decides the same."""
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(value, order="deterministic"))
