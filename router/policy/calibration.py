"""How fast are pods and links?

The coefficients of the cost model, fitted to observed times:

    prefill   T(n, p) = F + c1 (n - p) + c2 (n^2 - p^2)       by class of pods (model, hardware, engine), and by pod
              F = c0, or d0 + d1 b + d2 ctx if b decode       if a pod differs from its class
    transfer  T(b, k) = t0 + b (1 + k) / B                    by class of links

Coefficients of a decode step are learnt from the prompts that were computed in it: docs/cost-model.md#calibration.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from statistics import median
from typing import Final

import msgspec

from router.guards import Bound
from router.policy.fit import Fit, FitState, Vector
from router.policy.prefill_clock import PrefillObservation, TransferObservation
from router.types import Link, Pod, PodId, PodSpeed

VERSION: Final = 2
"""Version of the data that `dump` returns."""

SHAPE_SD: Final = (1.5, 0.5, 0.5, 0.7, 0.7, 0.5)
"""For c0, c1, c2, d0, d1, d2. c0 and d0 also include what priors omit: network and tokenizing."""
LINK_SHAPE_SD: Final = (1.5, 1.0)
FLOOR: Final = (1.0, 1e-4, 1e-9, 1.0, 1e-3, 1e-6)
LINK_FLOOR: Final = (0.1, 1e-9)
"""Minimum priors: a prior of 0 could not be scaled."""
CALIBRATION: Final = Bound("calibration", 32 * 1024, 32)
"""What `load` reads. An item is a fit of 0.6 KB, which takes 60 us to check."""
MAX_LOG_FACTOR: Final = math.log(20)
"""`load` takes no fit with a coefficient this far from its prior: the router measures such pods itself."""
PLAUSIBLE_MS: Final = (0.01, 3_600_000.0)

LEAVE: Final = 0.25
RETURN: Final = 0.1
"""A pod leaves its class at this mean log difference of its times (LEAVE), and returns below RETURN."""
REFERENCE_TOKENS: Final = 1000
"""Length of the prompt by which speeds are compared."""
BIAS_RATE: Final = 0.08
BIAS_CLIP: Final = 0.7


class UnreadableCalibration(ValueError):
    """Raised for data that `dump` of this version does not return."""


@dataclass(frozen=True, slots=True)
class CalibrationRow:
    """One coefficient for metrics; `pod` is empty for a class. Errors are mean absolute relative errors of the last
    observations: of the prior (`error_before`) and of the coefficients in use (`error_after`)."""

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
    """A pod. `bias` is the mean log ratio of its times to those expected of its class; while it is large, the pod has
    its `own` fit."""

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
        """Give the pod its own fit. If most pods have left, the class itself has changed, or follows pods that are
        observed more often: it gets the median speed, with one vote a pod, and all return to it."""
        if 2 * (self.away + 1) > len(self.members):
            if self.away:
                self.fit.shift(median(map(self._log_factor, self.members.values())))
            self.members = {pod: _Member() for pod in self.members}
            self.away = 0
            return
        member.own = Fit(self.fit.coefficients, SHAPE_SD)
        self.away += 1

    def _log_factor(self, member: _Member) -> float:
        """How much slower the pod is than its class, as a logarithm."""
        return member.bias if member.own is None else math.log(_reference_ms(member.own) / _reference_ms(self.fit))


def _reference_ms(fit: Fit) -> float:
    return PodSpeed(*fit.coefficients).prefill_ms(REFERENCE_TOKENS, 0)


def class_key(pod: Pod) -> str:
    """The name of a pod's class: pods of one model, engine and hardware are expected to be equally fast."""
    return f"{pod.base_model}/{pod.engine}/{pod.hardware or 'default'}"


def _is_of(class_key: str, model: str | None) -> bool:
    return model is None or class_key.startswith(f"{model}/")


class Calibration:
    """The owner of all fits, by class of pods (see `class_key`) and by kind of link.

    A fit belongs to its prior: with another prior, from another configuration, it starts again.
    """

    def __init__(self) -> None:
        self._classes: dict[str, _PodClass] = {}
        self._links: dict[str, Fit] = {}

    def observe_prefill(self, class_key: str, pod_id: PodId, prior: PodSpeed, seen: PrefillObservation) -> None:
        """Learn from one window of a pod; implausible ones are ignored. O(1)."""
        features = seen.features
        if not _plausible(features, seen.elapsed_ms):
            return
        known = self._classes.get(class_key)
        if known is None or known.fit.prior != _terms(prior):
            known = self._classes[class_key] = _PodClass(Fit(_terms(prior), SHAPE_SD))
        known.observe(pod_id, features, seen.elapsed_ms)

    def observe_transfer(self, kind: str, prior: Link, seen: TransferObservation) -> None:
        """Learn from one transfer or handoff; implausible ones are ignored. O(1)."""
        features = (1.0, seen.kv_bytes * (1 + seen.concurrent))
        if not _plausible(features, seen.elapsed_ms):
            return
        known = self._links.get(kind)
        if known is None or known.prior != _link_terms(prior):
            known = self._links[kind] = Fit(_link_terms(prior), LINK_SHAPE_SD)
        known.observe(features, seen.elapsed_ms)

    def speed(self, class_key: str, pod_id: PodId, prior: PodSpeed) -> PodSpeed:
        """The pod's current coefficients; `prior` without observations."""
        known = self._classes.get(class_key)
        if known is None or known.fit.prior != _terms(prior):
            return prior
        member = known.members.get(pod_id)
        return PodSpeed(*((member and member.own) or known.fit).coefficients)

    def link(self, kind: str, prior: Link) -> Link:
        known = self._links.get(kind)
        if known is None or known.prior != _link_terms(prior):
            return prior
        t0_ms, ms_per_byte = known.coefficients
        return replace(prior, t0_ms=t0_ms, bytes_per_ms=1 / ms_per_byte)

    def slowdowns(self) -> dict[PodId, float]:
        """The time of a prefill of 1,000 tokens relative to the pod's class, of each pod that differs from it."""
        return {
            pod: _reference_ms(member.own) / _reference_ms(known.fit)
            for known in self._classes.values()
            for pod, member in known.members.items()
            if member.own is not None
        }

    def forget(self, class_key: str, pod_id: PodId) -> None:
        """Remove a pod. What its class has learnt from it stays."""
        known = self._classes.get(class_key)
        member = known.members.pop(pod_id, None) if known else None
        if known and member and member.own:
            known.away -= 1

    # --- serialization and metrics ---

    def dump(self, model: str | None = None) -> bytes:
        """The fits of all links and of the classes of `model`, None for every model; a pod's own fit is not kept."""
        classes = {key: known.fit.state() for key, known in self._classes.items() if _is_of(key, model)}
        links = {kind: fit.state() for kind, fit in self._links.items()}
        return msgspec.msgpack.encode(_State(VERSION, classes, links))

    def load(self, value: bytes, model: str | None = None) -> None:
        """Replace each fit by one of the same prior with more observations; of the classes, only those of `model`, None
        for every model. Raises `UnreadableCalibration` and changes nothing for data of another version."""
        try:
            state = CALIBRATION.msgpack(value, msgspec.msgpack.Decoder(_State))
            CALIBRATION.check_items(len(state.classes) + len(state.links))
            if state.version != VERSION:
                raise UnreadableCalibration(f"version {state.version}, not {VERSION}")
            classes = {key: Fit.restored(fit, SHAPE_SD) for key, fit in state.classes.items() if _is_of(key, model)}
            links = {kind: Fit.restored(fit, LINK_SHAPE_SD) for kind, fit in state.links.items()}
        except ValueError as error:  # msgspec's errors are
            raise UnreadableCalibration(str(error)) from error
        own = {key: known.fit for key, known in self._classes.items()}
        of_model = {key: fit for key, fit in own.items() if _is_of(key, model)}
        self._classes |= {key: _PodClass(fit) for key, fit in _better(classes, of_model)}
        self._links |= dict(_better(links, self._links))

    def rows(self) -> Iterator[CalibrationRow]:
        """The coefficients of every class, of every pod with its own fit, and of every kind of link."""
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
    for term, value in zip(fields(PodSpeed), fit.coefficients, strict=False):  # its launches are not learnt
        yield CalibrationRow(key, pod, term.name, value, fit.confidence, fit.error_before, fit.error_after)


def _better(found: Mapping[str, Fit], own: Mapping[str, Fit]) -> Iterator[tuple[str, Fit]]:
    room = CALIBRATION.max_items - len(own)
    for key, fit in found.items():
        known = own.get(key)
        factors = (abs(math.log(value / prior)) for value, prior in zip(fit.coefficients, fit.prior, strict=True))
        room -= known is None
        is_better = room >= 0 if known is None else fit.prior == known.prior and fit.evidence > known.evidence
        if is_better and max(factors) <= MAX_LOG_FACTOR:
            yield key, fit


def _terms(speed: PodSpeed) -> Vector:
    """The coefficients as priors of a fit. An unknown d0 counts as c0."""
    c0, c1, c2, d0, d1, d2 = speed.coefficients
    return tuple(map(max, (c0, c1, c2, d0 or c0, d1, d2), FLOOR))


def _link_terms(link: Link) -> Vector:
    t0_ms, ms_per_byte = LINK_FLOOR
    return max(link.t0_ms, t0_ms), max(1 / link.bytes_per_ms, ms_per_byte)


def _plausible(features: Vector, elapsed_ms: float) -> bool:
    min_ms, max_ms = PLAUSIBLE_MS
    return min_ms <= elapsed_ms <= max_ms and any(features) and all(0 <= x < 1e15 for x in features)
