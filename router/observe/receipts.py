"""What was decided about a request, why, and how did the request end? And files of that.

A `Receipt` has the facts of a decision and of its ended request as numbers, computed when it is requested or written:
lengths, block hashes, prices and times. It has the prompt only if `receipts.prompts` is on, and never a response.

Each line of a file is a JSON object: a request, a fleet, which is written before the first scene that refers to it, or
a change of the fleet; `kind` says which. A disk error disables the file and fails no request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from errno import ENOSPC
from fcntl import LOCK_EX, flock
from io import FileIO
from itertools import count
from os import fstat
from os.path import samestat
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import structlog

from router.decision import Candidate
from router.observe.changes import Change
from router.observe.ended import Ended, Failure, RecordedDecision
from router.policy.decide import expected_ttft_ms
from router.policy.explain import Column, Explanation, PricedPlan, explain, priced
from router.policy.price import choice_of
from router.policy.recording import (
    FleetLine,
    RecordedScene,
    SceneLine,
    digest_of,
    fleet_digest,
    fleet_line,
    scene_line,
)
from router.policy.spec import Policy
from router.types import FleetSnapshot, PromptPrefix

RECEIPT_BLOCK_TOKENS = 32
"""Receipts have one chain hash for this number of tokens, which covers the whole prefix. A simulation finds hits only
as exactly; earlier versions wrote one for 128, and lost several percent of short prompts."""


class Receipt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="receipt"):
    """One request that arrived at the Unix time `at_s`. `blocks` are chain hashes, one for every `block_size_tokens` of
    the prompt. Fields without a value are omitted; a request without a result is still being served."""

    at_s: float
    model: str
    endpoint: str
    result: str = ""
    id: str = ""
    name: str = ""
    """The name that its client asked for, if the model has another."""
    fallback: str = ""
    """Why a fallback of the name served it."""
    money: float | None = None
    """What a provider took, if one served it."""
    trace_id: str = ""
    """With `tracing.enabled`."""
    pod: str = ""
    prefill_pod: str = ""
    """The pod that computed the prompt, if it is not `pod`."""
    tenant: str = ""
    workload: str = ""
    """Workload class."""
    stream: bool = False
    policy: str = ""
    policy_version: str = ""
    reason: str = ""
    prompt_tokens: int = 0
    output_tokens: int | None = None
    block_size_tokens: int = 0
    blocks: list[int] = []
    predicted_ms: float | None = None
    predicted_cached_tokens: int | None = None
    cached_tokens: int | None = None
    ttft_ms: float | None = None
    e2e_ms: float = 0.0
    candidates: tuple[PricedPlan, ...] = ()
    """The best of `candidate_count`, best first."""
    candidate_count: int = 0
    failures: tuple[Failure, ...] = ()
    continued: tuple[str, ...] = ()
    """How each later pod continued its broken stream."""
    phases_ms: dict[str, float] = {}
    scene_digest: str = ""
    scene: SceneLine | None = None
    prompt: Any = None


_OF_ENDED = set(Ended.__struct_fields__).intersection(Receipt.__struct_fields__) - {"tenant", "workload", "policy"}
"""The fields of both that also a request without a decision has in its receipt."""

Line: TypeAlias = Receipt | FleetLine
"""A line of a receipts file."""


def receipt(ended: Ended, *, prompt: PromptPrefix | None = None) -> Receipt:
    """An ended request in numbers, without its scene. `prompt` adds its block hashes."""
    block_size_tokens, blocks = receipt_blocks(prompt) if prompt else (0, [])
    served = ended.served
    choice = choice_of(served.plan) if served else None
    found = Receipt(
        **{name: getattr(ended, name) for name in _OF_ENDED},
        pod=choice.pod if choice else "",
        prefill_pod=choice.prefill_pod if choice else "",
        block_size_tokens=block_size_tokens,
        blocks=blocks,
        money=served.money if served else None,
        predicted_ms=expected_ttft_ms(served.cost) if served else None,
        predicted_cached_tokens=served.cached_tokens if served else None,
        phases_ms={phase: taken_s * 1000 for phase, taken_s in ended.phases_s.items()},
    )
    if ended.decision is not None:
        return _decided(found, ended.decision, served)
    if served is None:
        return found
    known = {"tenant": ended.tenant, "workload": ended.workload, "policy": ended.policy}
    return msgspec.structs.replace(found, **known, candidates=(priced(served),), candidate_count=1)


def decision_receipt(kept: RecordedDecision) -> Receipt:
    """The receipt of a decision whose request is still served."""
    facts = kept.scene
    known = Ended(
        *(facts.request_id, kept.at_s, facts.model, facts.endpoint.value, ""),
        prompt_tokens=facts.prompt_tokens or 0,
        name=facts.name,
    )
    return _decided(receipt(known), kept, None)


def _decided(found: Receipt, kept: RecordedDecision, served: Candidate | None) -> Receipt:
    """The receipt with its decision: the best candidates, and the one that served."""
    shown = kept.candidates if served is None or served in kept.candidates else (*kept.candidates, served)
    return msgspec.structs.replace(
        found,
        tenant=kept.scene.tenant,
        workload=kept.scene.workload,
        stream=kept.scene.stream,
        policy=kept.policy.name,
        policy_version=kept.policy.version,
        reason=kept.reason,
        candidates=tuple(priced(candidate) for candidate in shown),
        candidate_count=kept.candidate_count,
        prompt=kept.prompt,
    )


class Explained(msgspec.Struct, frozen=True, omit_defaults=True):
    explanation: Explanation
    receipt: Receipt
    providers: tuple[PricedPlan, ...] = ()
    """What else could serve it, in the order of its name's fallbacks; known of previews."""


def explained(kept: RecordedDecision, ended: Ended | None = None) -> Explained:
    """The response of `/admin/explain`."""
    found = receipt(ended) if ended else decision_receipt(kept)
    why = explain(kept.scene.scene(), kept.policy, found.candidates, kept.candidate_count, kept.reason)
    return Explained(why, found, tuple(map(priced, kept.providers)))


def explained_later(found: Receipt, scene: RecordedScene | None, policy: Policy | None) -> Explained:
    """The same for a line of a file, and for a request that a provider served. Without its scene, or that version of
    its policy, it has the recorded prices alone, and names what is missing."""
    plans, version = found.candidates, found.policy_version
    if scene and policy and policy.version == version:
        return Explained(explain(scene.scene(), policy, plans, found.candidate_count, found.reason), found)
    missing = f"version {version} of the policy in --policies" if scene else "receipts.replay_data"
    columns = tuple(Column(plan, ()) for plan in plans)
    why = f"Provider {found.model} served it." if found.money is not None else "No pod was chosen."
    if plans and found.money is None:
        why = f"{plans[0].choice}, by {found.reason}. Inputs and formulas need {missing}."
    return Explained(
        Explanation(
            found.id, found.model, found.policy, version, found.reason, why, found.candidate_count, (), (), columns
        ),
        found,
    )


def receipt_blocks(prompt: PromptPrefix) -> tuple[int, list[int]]:
    """Block size and chain hashes of a receipt: a subset of the prompt's."""
    stride = max(RECEIPT_BLOCK_TOKENS // prompt.block_size_tokens, 1)
    return stride * prompt.block_size_tokens, [int(block) for block in prompt.hashes[stride - 1 :: stride]]


FLUSH_INTERVAL_S = 1.0
MAX_BUFFERED_BYTES = 1 << 16
REPEAT_FLEET_AFTER_SCENES = 1000
"""The fleet is written again because files are rotated."""
_Later = Callable[[float, Callable[[], None]], object]
"""Calls once, after a delay in seconds."""

_encode = msgspec.json.Encoder().encode
log = structlog.get_logger()


class ReceiptWriter:
    """Writes the lines of requests, without newlines, to `sink`, which does not wait or raise. `files`: how often the
    lines went on in another file, each of which repeats the fleet. `scenes`: include the input of the decision, for a
    replay."""

    def __init__(
        self, sink: Callable[[bytes], None], files: Callable[[], int] = lambda: 0, *, scenes: bool = True
    ) -> None:
        self._sink = sink
        self._files = files
        self._begun = files()
        self._scenes = scenes
        self._fleet: FleetSnapshot | None = None
        self._digest = ""
        self._since = 0

    def write(self, ended: Ended, prompt: PromptPrefix | None) -> None:
        found, kept = receipt(ended, prompt=prompt), ended.decision
        if kept is not None and self._scenes:
            scene = self._scene(kept.scene, kept.at_s)
            found = msgspec.structs.replace(found, scene=scene, scene_digest=digest_of(scene))
        self._put(found)

    def write_change(self, change: Change) -> None:
        self._sink(_encode(change))

    def _scene(self, scene: RecordedScene, at_s: float) -> SceneLine:
        fleet = scene.fleet
        if self._fleet is None or not _same_facts(fleet, self._fleet):
            known, self._digest = self._digest, fleet_digest(fleet)
            if known != self._digest:
                self._since = REPEAT_FLEET_AFTER_SCENES
        self._fleet = fleet
        if self._files() != self._begun:
            self._begun, self._since = self._files(), REPEAT_FLEET_AFTER_SCENES
        if self._since >= REPEAT_FLEET_AFTER_SCENES:
            self._put(fleet_line(fleet, self._digest, at_s))
            self._since = 0
        self._since += 1
        return scene_line(scene, self._digest)

    def _put(self, line: Line) -> None:
        self._sink(_encode(line))


def _same_facts(one: FleetSnapshot, other: FleetSnapshot) -> bool:
    """Whether pods and states are identical; loads may differ. O(pods)."""
    if one is other:
        return True
    if len(one.pods) != len(other.pods) or one.links != other.links:
        return False
    return all(a.pod is b.pod and a.state is b.state for a, b in zip(one.pods, other.pods, strict=True))


@dataclass(slots=True, eq=False)
class UsageWriter:
    """Numbers the lines of this process without gaps, so that a reader knows each line by its id and notices missing
    ones, and passes them on as JSON. `process`: a name that no other ever has."""

    process: str
    sink: Callable[[bytes], None]
    close: Callable[[], None] = lambda: None
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def ended(self, ended: Ended, _prompt: PromptPrefix | None = None) -> None:
        if (used := ended.used) is None:
            return
        line: dict[str, Any] = {
            "id": f"{self.process}-{next(self._numbers)}",
            "request_id": ended.id,
            "at_s": ended.at_s,
            "tenant": ended.tenant,
            "model": ended.model,
            "name": ended.name or None,
            "adapter": ended.adapter or None,
            "endpoint": ended.endpoint,
            "status": ended.status,
            "result": ended.result,
            "prompt_tokens": used.prompt_tokens,
            "cached_tokens": used.cached_tokens,
            "computed_tokens": used.computed_tokens,
            "output_tokens": used.output_tokens,
            "ttft_ms": ended.ttft_ms,
            "money": ended.served.money if ended.served else None,
            "estimated": used.estimated or None,
        }
        self.sink(_encode({name: value for name, value in line.items() if value is not None}))


@dataclass(slots=True, eq=False)
class ReceiptLog:
    """Appends whole lines to a file, which several routers may share. A line is written at most `FLUSH_INTERVAL_S`
    after it was received: `later(delay_s, call)` starts the timer.

    Above `max_bytes` (0: no limit) the file is renamed to FILE.1, FILE.1 to FILE.2 and so on; `kept` of them remain.
    After a disk error up to `retried_bytes` are written again until that succeeds, and `on_lost` is called for each
    line beyond; with 0 the file is disabled, and `on_lost` is called for each further line."""

    path: Path
    later: _Later
    max_bytes: int = 0
    kept: int = 1
    retried_bytes: int = 0
    on_lost: Callable[[], None] = lambda: None
    _failing: bool = False
    _file: FileIO | None = None
    _buffer: bytearray = field(default_factory=bytearray)
    _is_flush_due: bool = False
    files: int = 0
    """How often the lines went on in another file."""

    def __post_init__(self) -> None:
        self._file = _opened(self.path)

    def write(self, line: bytes) -> None:
        if self._file is None:
            self.on_lost()
            return
        if self.retried_bytes and len(self._buffer) + len(line) > self.retried_bytes:
            self.on_lost()
            return
        self._buffer += line + b"\n"
        if len(self._buffer) > MAX_BUFFERED_BYTES and not self._failing:
            self._flush()
        elif not self._is_flush_due:
            self._is_flush_due = True
            self.later(FLUSH_INTERVAL_S, self._flush_in_time)

    def close(self) -> None:
        self._flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _flush_in_time(self) -> None:
        self._is_flush_due = False
        self._flush()

    def _flush(self) -> None:
        """Write in one call, so that lines of two routers do not mix."""
        file, buffered, self._buffer = self._file, self._buffer, bytearray()
        if file is None or not buffered:
            return None
        written = 0
        try:
            if file.closed or not _is_at(self.path, file):
                file = self._reopen(file)
            written = file.write(buffered)
            if written != len(buffered):
                raise OSError(ENOSPC, "short write")
            self._failing = False
            if 0 < self.max_bytes < fstat(file.fileno()).st_size:
                self._rotate(file)
        except OSError as error:
            if self.retried_bytes:
                return self._retry(buffered, written, error)
            log.error("receipt log disabled", file=str(self.path), error=str(error))
            self._file = None
            file.close()

    def _retry(self, buffered: bytearray, written: int, error: OSError) -> None:
        """Write again later what was not written. A line that was written in part is repeated after a newline."""
        if not self._failing:
            log.error("file cannot be written; trying again", file=str(self.path), error=str(error))
        self._failing = True
        whole = buffered.rfind(b"\n", 0, written) + 1
        self._buffer = bytearray(b"\n" if written > whole else b"") + buffered[whole:] + self._buffer
        if self._buffer and not self._is_flush_due:
            self._is_flush_due = True
            self.later(FLUSH_INTERVAL_S, self._flush_in_time)

    def _rotate(self, file: FileIO) -> None:
        """Rename the files, unless another router has done so while this one waited for the lock."""
        flock(file, LOCK_EX)
        if _is_at(self.path, file):
            for number in range(self.kept, 0, -1):
                older = self._numbered(number - 1)
                if older.exists():
                    older.replace(self._numbered(number))
        self._reopen(file)

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}") if number else self.path

    def _reopen(self, file: FileIO) -> FileIO:
        """Continue in the file that the path names now: this one was renamed or removed. Closing releases its lock."""
        file.close()
        self._file = opened = _opened(self.path)
        self.files += 1
        return opened


def _opened(path: Path) -> FileIO:
    file = FileIO(path, "ab")
    path.chmod(0o600)
    return file


def _is_at(path: Path, file: FileIO) -> bool:
    """Whether `path` still names this open file."""
    try:
        return samestat(path.stat(), fstat(file.fileno()))
    except FileNotFoundError:
        return False
