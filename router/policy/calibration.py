"""How fast are these pods and links really?

The coefficients of the cost model, refitted from times that were observed:

    prefill   T(n, p) = F + c1 (n - p) + c2 (n^2 - p^2)       by class of pods (model, hardware, engine), and by pod
              F = c0, or d0 + d1 b + d2 ctx where b decode    where one differs from its class
    transfer  T(b, k) = t0 + b (1 + k) / B                    by class of links

Pure: times come in as values, nothing here looks at a clock. A decode step is learnt from the prompts that were
computed in one. Source of the formulas: reference/cost-model.md, simulator.md 5.2.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Final

import msgspec

from router.policy.fit import Fit, FitState, Vector
from router.types import Link, Pod, PodId, PodSpeed

VERSION: Final = 2
"""Of what `dump` returns."""

SHAPE_SD: Final = (1.5, 0.5, 0.5, 0.7, 0.7, 0.5)
"""Of c0, c1, c2, d0, d1, d2. c0 and d0 also take up what no table knows: network, tokenizing."""
LINK_SHAPE_SD: Final = (1.5, 1.0)
FLOOR: Final = (1.0, 1e-4, 1e-9, 1.0, 1e-3, 1e-6)
LINK_FLOOR: Final = (0.1, 1e-9)
"""What a prior of 0 counts as: it could not be multiplied into anything."""
PLAUSIBLE_MS: Final = (0.01, 3_600_000.0)

SAME_STEP_S: Final = 0.001
"""First tokens that come within this were computed in one step."""
LONGEST_STEP_S: Final = 0.5
"""A step that was seen to begin longer ago has ended unseen."""
WINDOW_STARTS: Final = 3
"""A pod that is never idle is observed in windows of so many first tokens."""

LEAVE: Final = 0.25
RETURN: Final = 0.1
"""A pod leaves its class when its times differ by this logarithm, and comes back when they differ by no more."""
BIAS_RATE: Final = 0.08
BIAS_CLIP: Final = 0.7


# --- what is observed ---


class PrefillObservation(msgspec.Struct, frozen=True, gc=False):
    """What one pod computed in `elapsed_ms`: sums over prompts of n - p and n^2 - p^2. `starts` counts the steps that
    computed nothing else, `steps` those in which others decoded, with sums over these of who did and of their context.
    """

    starts: int
    tokens: int
    tokens2: int
    elapsed_ms: float
    steps: float = 0.0
    step_requests: float = 0.0
    step_context_tokens: float = 0.0

    @property
    def features(self) -> Vector:
        """What c0, c1, c2, d0, d1 and d2 are multiplied with."""
        return (
            *(float(self.starts), float(self.tokens), float(self.tokens2)),
            *(self.steps, self.step_requests, self.step_context_tokens),
        )

    def corrected(self, believed_cached_tokens: int, cached_tokens: int) -> PrefillObservation:
        """The same when one of the prompts had more or less in the cache than was believed."""
        believed, found = believed_cached_tokens, cached_tokens
        more, more2 = believed - found, believed * believed - found * found
        return msgspec.structs.replace(self, tokens=self.tokens + more, tokens2=self.tokens2 + more2)


class Beside(msgspec.Struct, frozen=True, gc=False):
    """Who decodes on a pod while a prompt is computed, and with how much context in all."""

    requests: int = 0
    context_tokens: int = 0


ALONE: Final = Beside()


@dataclass(frozen=True, slots=True)
class TransferObservation:
    """One transfer of KV, beside which its sender had `concurrent` others."""

    kv_bytes: float
    concurrent: int
    elapsed_ms: float


class PrefillClock:
    """How long did one pod compute on what was sent to it?

    A window begins when a prompt is sent to a pod where none of ours waits for its first token, and ends when none does
    again. In between the pod computes without pause, in whatever order and chunks, so that the window's sums are exact
    where those of a single prompt in a batch are not. The window of a lone prompt is its time to first token; where
    others decode it begins with the step that the prompt had to wait for. Where some prompt always waits, windows end
    every `WINDOW_STARTS` steps, off by a part of one step at the most.
    """

    def __init__(self) -> None:
        self._waiting: dict[Hashable, tuple[int, int]] = {}
        """By request in the order sent: n - p and n^2 - p^2."""
        self._begin(0.0)

    def sent(
        self,
        request: Hashable,
        prompt_tokens: int,
        cached_tokens: int,
        now_s: float,
        beside: Beside = ALONE,
        step_began_s: float = -math.inf,
    ) -> None:
        """A prompt is on its way to the pod, which is believed to have `cached_tokens` of it. `beside` decode there, in
        a step that began at `step_began_s` if anybody saw it: else half of it is taken to be over."""
        n, p = prompt_tokens, cached_tokens
        if not self._waiting:
            seen = beside.requests > 0 and now_s - step_began_s < LONGEST_STEP_S
            self._begin(step_began_s if seen else now_s)
            if beside.requests:
                self._add_step(beside, 1.0 if seen else 0.5)
        self._waiting[request] = (n - p, n * n - p * p)

    def first_token(self, request: Hashable, now_s: float, beside: Beside = ALONE) -> PrefillObservation | None:
        """Its prefill is done, while `beside` decoded; what that teaches, if anything. Again, or after `gone`, it
        changes nothing."""
        if request not in self._waiting:
            return None
        in_order = next(iter(self._waiting)) == request
        self._count(*self._waiting.pop(request), now_s, beside)
        if self._waiting and not (in_order and (self._spoilt or self._ends >= WINDOW_STARTS)):
            return None
        observation = self._observation(now_s)
        if self._waiting:  # else a window begins with what is sent next
            self._begin(now_s)
        return observation

    def gone(self, request: Hashable) -> None:
        """It failed, was cancelled, or its first token cannot be seen: nobody knows what was computed of it. Again, or
        after its first token, it changes nothing."""
        if self._waiting.pop(request, None) is not None:
            self._spoilt = True

    def disturbed(self) -> None:
        """The pod spends time on what did not come through here: the window under way teaches nothing."""
        self._spoilt = True

    def _begin(self, now_s: float) -> None:
        self._began_s = self._last_s = now_s
        self._ends = self._starts = self._tokens = self._tokens2 = 0
        self._steps = self._step_requests = self._step_context_tokens = 0.0
        self._spoilt = False

    def _count(self, tokens: int, tokens2: int, now_s: float, beside: Beside) -> None:
        if now_s - self._last_s > SAME_STEP_S:
            self._ends += 1
            if beside.requests:
                self._add_step(beside, 1.0)
            else:
                self._starts += 1
        self._tokens += tokens
        self._tokens2 += tokens2
        self._last_s = now_s

    def _add_step(self, beside: Beside, share: float) -> None:
        self._steps += share
        self._step_requests += share * beside.requests
        self._step_context_tokens += share * beside.context_tokens

    def _observation(self, now_s: float) -> PrefillObservation | None:
        if self._spoilt or not self._ends:
            return None
        elapsed_ms = (now_s - self._began_s) * 1000
        return PrefillObservation(
            self._starts, self._tokens, self._tokens2, elapsed_ms,
            self._steps, self._step_requests, self._step_context_tokens,
        )  # fmt: skip


# --- what is learnt ---


class UnreadableCalibration(Exception):
    """Not what `dump` of this version returns."""


@dataclass(frozen=True, slots=True)
class CalibrationRow:
    """One coefficient as metrics show it; `pod` is empty for a whole class. Errors are mean absolute relative ones of
    the last observations, by the prior and by what was given out instead."""

    subject: str
    pod: PodId
    coefficient: str
    value: float
    confidence: float
    error_before: float
    error_after: float


class _State(msgspec.Struct, frozen=True):
    version: int
    classes: dict[str, FitState]
    links: dict[str, FitState]


@dataclass(slots=True)
class _Member:
    """A pod. `bias` is the mean logarithm of its times by those that its class expects; while it is much, the pod has
    a fit of its `own`."""

    bias: float = 0.0
    own: Fit | None = None


@dataclass(slots=True)
class _PodClass:
    fit: Fit
    members: dict[PodId, _Member] = field(default_factory=dict)
    away: int = 0

    def observe(self, pod: PodId, features: Vector, elapsed_ms: float) -> None:
        member = self.members.setdefault(pod, _Member())
        self._compare(member, self.fit.residual(features, elapsed_ms))
        (member.own or self.fit).observe(features, elapsed_ms)

    def _compare(self, member: _Member, residual: float) -> None:
        member.bias += (min(max(residual, -BIAS_CLIP), BIAS_CLIP) - member.bias) * BIAS_RATE
        if member.own is None and abs(member.bias) > LEAVE:
            self._leave(member)
        elif member.own is not None and abs(member.bias) < RETURN:
            member.own = None
            self.away -= 1

    def _leave(self, member: _Member) -> None:
        """A class that most pods would have left has changed itself: all of them stay, and it learns."""
        if 2 * (self.away + 1) > len(self.members):
            self.members = {pod: _Member() for pod in self.members}
            self.away = 0
            return
        member.own = Fit(self.fit.coefficients, SHAPE_SD)
        self.away += 1


def class_key(pod: Pod) -> str:
    """Names the class of a pod: pods of one model, engine and hardware are expected to be equally fast."""
    return f"{_class_prefix(model_of(pod))}{pod.engine}/{pod.hardware or 'default'}"


def model_of(pod: Pod) -> str:
    """The model under which the pod's calibration is kept; "" if it is not known yet."""
    return pod.models[0] if pod.models else ""


def _class_prefix(model: str) -> str:
    return f"{model}/"


class Calibration:
    """The one owner of what was learnt. Keys are opaque: a class of pods has one model, hardware and engine; a kind of
    links has one way and direction.

    A fit belongs to the prior that it started from: under another prior, of another configuration, it starts anew.
    """

    def __init__(self) -> None:
        self._classes: dict[str, _PodClass] = {}
        self._links: dict[str, Fit] = {}

    def observe_prefill(self, class_key: str, pod_id: PodId, prior: PodSpeed, seen: PrefillObservation) -> None:
        """Learn from one window of a pod; what cannot be true is left out. O(1)."""
        features = seen.features
        if not _plausible(features, seen.elapsed_ms):
            return
        known = self._classes.get(class_key)
        if known is None or known.fit.prior != _terms(prior):
            known = self._classes[class_key] = _PodClass(Fit(_terms(prior), SHAPE_SD))
        known.observe(pod_id, features, seen.elapsed_ms)

    def observe_transfer(self, kind: str, prior: Link, seen: TransferObservation) -> None:
        """Learn from one transfer or handoff; what cannot be true is left out. O(1)."""
        features = (1.0, seen.kv_bytes * (1 + seen.concurrent))
        if not _plausible(features, seen.elapsed_ms):
            return
        known = self._links.get(kind)
        if known is None or known.prior != _link_terms(prior):
            known = self._links[kind] = Fit(_link_terms(prior), LINK_SHAPE_SD)
        known.observe(features, seen.elapsed_ms)

    def speed(self, class_key: str, pod_id: PodId, prior: PodSpeed) -> PodSpeed:
        """The pod's coefficients, as far as they are known by now."""
        known = self._classes.get(class_key)
        if known is None or known.fit.prior != _terms(prior):
            return prior
        member = known.members.get(pod_id)
        return PodSpeed(*((member and member.own) or known.fit).coefficients)

    def link(self, kind: str, prior: Link) -> Link:
        """The link's, likewise."""
        known = self._links.get(kind)
        if known is None or known.prior != _link_terms(prior):
            return prior
        t0_ms, ms_per_byte = known.coefficients
        return replace(prior, t0_ms=t0_ms, bytes_per_ms=1 / ms_per_byte)

    def forget(self, class_key: str, pod_id: PodId) -> None:
        """The pod is gone. What it taught its class stays."""
        known = self._classes.get(class_key)
        member = known.members.pop(pod_id, None) if known else None
        if known and member and member.own:
            known.away -= 1

    # --- kept, shared, shown ---

    def dump(self, model: str | None = None) -> bytes:
        """The fits of all links and of the classes of `model`, None for every model; a pod's own fit is not kept."""
        classes = {
            key: known.fit.state()
            for key, known in self._classes.items()
            if model is None or key.startswith(_class_prefix(model))
        }
        links = {kind: fit.state() for kind, fit in self._links.items()}
        return msgspec.msgpack.encode(_State(VERSION, classes, links))

    def load(self, value: bytes) -> None:
        """Take over each fit that has seen more than our own of the same prior. Raises `UnreadableCalibration`, and
        then nothing has changed."""
        try:
            state = msgspec.msgpack.decode(value, type=_State)
            if state.version != VERSION:
                raise UnreadableCalibration(f"version {state.version}, not {VERSION}")
            classes = {key: Fit.restored(fit, SHAPE_SD) for key, fit in state.classes.items()}
            links = {kind: Fit.restored(fit, LINK_SHAPE_SD) for kind, fit in state.links.items()}
        except ValueError as error:  # msgspec's errors are
            raise UnreadableCalibration(str(error)) from error
        own = {key: known.fit for key, known in self._classes.items()}
        self._classes |= {key: _PodClass(fit) for key, fit in _better(classes, own)}
        self._links |= dict(_better(links, self._links))

    def rows(self) -> Iterator[CalibrationRow]:
        """Every coefficient of every class, of every pod that differs from its class, and of every kind of links."""
        for key, known in self._classes.items():
            yield from _rows(key, "", known.fit)
            for pod, member in known.members.items():
                if member.own is not None:
                    yield from _rows(key, pod, member.own)
        for kind, fit in self._links.items():
            t0_ms, ms_per_byte = fit.coefficients
            for name, value in (("t0_ms", t0_ms), ("bytes_per_ms", 1 / ms_per_byte)):
                yield CalibrationRow(kind, "", name, value, fit.confidence, fit.error_before, fit.error_after)


def _rows(key: str, pod: PodId, fit: Fit) -> Iterator[CalibrationRow]:
    for term, value in zip(fields(PodSpeed), fit.coefficients, strict=True):
        yield CalibrationRow(key, pod, term.name, value, fit.confidence, fit.error_before, fit.error_after)


def _better(found: Mapping[str, Fit], own: Mapping[str, Fit]) -> Iterator[tuple[str, Fit]]:
    for key, fit in found.items():
        known = own.get(key)
        if known is None or (fit.prior == known.prior and fit.evidence > known.evidence):
            yield key, fit


def _terms(speed: PodSpeed) -> Vector:
    """A decode step that nobody knows anything of is taken for the fixed part of a prefill."""
    c0, c1, c2, d0, d1, d2 = speed.coefficients
    return tuple(map(max, (c0, c1, c2, d0 or c0, d1, d2), FLOOR))


def _link_terms(link: Link) -> Vector:
    t0_ms, ms_per_byte = LINK_FLOOR
    return max(link.t0_ms, t0_ms), max(1 / link.bytes_per_ms, ms_per_byte)


def _plausible(features: Vector, elapsed_ms: float) -> bool:
    least, most = PLAUSIBLE_MS
    return least <= elapsed_ms <= most and any(features) and all(0 <= x < 1e15 for x in features)
