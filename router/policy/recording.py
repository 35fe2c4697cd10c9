"""What must be kept of a scene, so that it can be decided again?

Lengths, one block hash, who holds how much, the fleet and its load: never a token or a word of the prompt. In memory a
recorded scene refers to the very values that the decision was made of; written down it is two kinds of lines, so that a
fleet stands there once for many scenes. This file never decides anything and never writes a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
import xxhash

from router.policy.ring import key_block
from router.types import (
    BlockHash,
    BlocksByTier,
    Endpoint,
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
    Scene,
    StepBegan,
)

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
BodyBytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]
"""Restored as so many bytes: a hostile line must not fill the memory."""


class LoadRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The fields of `PodLoad` that decide."""

    running: int
    waiting: int
    kv_usage: float
    our_prompts: int = 0

    @classmethod
    def of(cls, load: PodLoad) -> LoadRow:
        """The load as a row."""
        return cls(load.running, load.waiting, load.kv_usage, load.our_prompts)

    def load(self) -> PodLoad:
        """The row as a load."""
        return PodLoad(self.running, self.waiting, self.kv_usage, our_prompts=self.our_prompts)


class SceneFacts(msgspec.Struct, frozen=True, gc=False):
    """What policies read of a request and its prompt; its headers are not kept."""

    request_id: str
    endpoint: Endpoint
    model: str
    adapter: str = ""
    session: str = ""
    tenant: str = ""
    workload: str = ""
    """Its class: with tenant and stream, what the `match` of a policy goes by."""
    stream: bool = False
    max_output_tokens: int | None = None
    body_bytes: BodyBytes = 0
    """Of a prompt whose tokens are unknown."""
    prompt_tokens: Count | None = None
    block_size_tokens: Annotated[int, msgspec.Meta(ge=1)] = 1
    blocks: Count = 0
    """Full ones of the prompt."""
    key: BlockHash = 0
    """The hash of the block that the affinity key is taken from."""
    shared_blocks: Count = 0
    turn: Count = 0
    now_s: float = 0.0
    degraded: bool = False


class RecordedScene(SceneFacts, frozen=True, kw_only=True, gc=False):
    """A scene without its prompt and body."""

    match: Mapping[PodId, BlocksByTier]
    inflight: Mapping[PodId, InFlight]
    steps: Mapping[PodId, StepBegan]
    fleet: FleetSnapshot

    def scene(self) -> Scene:
        """One in which every policy decides as in the recorded one."""
        return Scene(
            request=InferenceRequest(
                id=self.request_id,
                endpoint=self.endpoint,
                model=self.model,
                adapter=self.adapter,
                session=self.session,
                tenant=self.tenant,
                stream=self.stream,
                max_output_tokens=self.max_output_tokens,
                body=bytes(self.body_bytes),
            ),
            prompt=self._prompt(),
            match=PrefixMatch(self.match, degraded=self.degraded),
            fleet=self.fleet,
            inflight=self.inflight,
            steps=self.steps,
            now_s=self.now_s,
            turn=self.turn,
            shared_blocks=self.shared_blocks,
        )

    def _prompt(self) -> PromptPrefix | None:
        if self.prompt_tokens is None:
            return None
        generation = Generation(model=self.model, block_size_tokens=self.block_size_tokens)
        hashes = _OneHash(self.blocks, key_block(self.blocks, self.shared_blocks), self.key)
        return PromptPrefix(generation, range(self.prompt_tokens), hashes)


class _OneHash(Sequence[BlockHash]):
    """A prompt's hashes, of which only the one that keys are made of is known: whoever reads another one fails, instead
    of deciding by what was not recorded."""

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
    return RecordedScene(
        request_id=request.id,
        endpoint=request.endpoint,
        model=request.model,
        adapter=request.adapter,
        session=request.session,
        tenant=request.tenant,
        workload=workload,
        stream=request.stream,
        max_output_tokens=request.max_output_tokens,
        body_bytes=0 if prompt else len(request.body),
        prompt_tokens=len(prompt.tokens) if prompt else None,
        block_size_tokens=prompt.generation.block_size_tokens if prompt else 1,
        blocks=blocks,
        key=prompt.hashes[key_block(blocks, scene.shared_blocks)] if prompt and blocks else 0,
        shared_blocks=scene.shared_blocks,
        turn=scene.turn,
        now_s=scene.now_s,
        degraded=match.degraded,
        match=match.blocks,
        inflight=scene.inflight,
        steps=scene.steps,
        fleet=scene.fleet,
    )


# --- written down ---


class FleetLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="fleet"):
    """Pods, their states and links. `fleet` is the digest of these facts, by which scenes refer to them; loads change
    too often to belong to them. `at_s` is the time of day at which it was written."""

    at_s: float
    version: Literal[1] = 1
    fleet: str
    pods: tuple[tuple[Pod, PodState], ...]
    links: Links

    def snapshot(self, loads: Sequence[LoadRow]) -> FleetSnapshot:
        """The fleet with these loads. Raises `ValueError` where they are not those of its pods."""
        rows = zip(self.pods, loads, strict=True)
        return FleetSnapshot(0, tuple(PodStatus(pod, state, load.load()) for (pod, state), load in rows), self.links)


class SceneLine(SceneFacts, frozen=True, kw_only=True, omit_defaults=True):
    """A recorded scene that names its fleet by its digest. `loads` are in the order of the fleet's pods."""

    fleet: str
    match: dict[PodId, BlocksByTier] = {}
    inflight: dict[PodId, InFlight] = {}
    steps: dict[PodId, StepBegan] = {}
    loads: tuple[LoadRow, ...] = ()

    def restored(self, fleet: FleetLine) -> RecordedScene:
        """The scene again. Raises `ValueError` where `fleet` is another one."""
        return RecordedScene(
            **_facts(self),
            match=self.match,
            inflight=self.inflight,
            steps=self.steps,
            fleet=fleet.snapshot(self.loads),
        )


def fleet_digest(fleet: FleetSnapshot) -> str:
    """Equal for fleets whose pods, states and links are equal. O(pods)."""
    return _digest((_pods(fleet), fleet.links))


def fleet_line(fleet: FleetSnapshot, digest: str, at_s: float) -> FleetLine:
    """The fleet as a line."""
    return FleetLine(at_s=at_s, fleet=digest, pods=_pods(fleet), links=fleet.links)


def scene_line(scene: RecordedScene, fleet: str) -> SceneLine:
    """The scene as a line that refers to its fleet's digest. O(pods)."""
    return SceneLine(
        **_facts(scene),
        fleet=fleet,
        match=dict(scene.match),
        inflight=dict(scene.inflight),
        steps=dict(scene.steps),
        loads=tuple(LoadRow.of(status.load) for status in scene.fleet.pods),
    )


def scene_digest(line: SceneLine) -> str:
    """Equal for scenes in which every policy decides alike."""
    return _digest(line)


def _facts(scene: SceneFacts) -> dict[str, Any]:
    return {name: getattr(scene, name) for name in SceneFacts.__struct_fields__}


def _pods(fleet: FleetSnapshot) -> tuple[tuple[Pod, PodState], ...]:
    return tuple((status.pod, status.state) for status in fleet.pods)


def _digest(value: object) -> str:
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(value, order="deterministic"))
