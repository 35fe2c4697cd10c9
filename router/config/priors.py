"""Reads cost priors: the expected speed of a model on some hardware and its KV bytes per token.

The files are `config/models/*.yaml`, and `config/hardware/gpus.yaml` for models without one. Calibration replaces the
speeds at run time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from router.config.load import Strict, load, shipped
from router.config.mistakes import nearest
from router.config.model_names import ModelNames
from router.config.pod_schema import PodConfig
from router.config.schema import CostPrior, ModelConfig
from router.errors import ConfigError
from router.types import PodSpeed

HARDWARE = re.compile(r"(?P<gpu>[a-z0-9]+)x(?P<count>[1-9][0-9]*)")
"""Name of a row, such as h100x4."""


def gpu_count(hardware: str) -> int:
    """The GPUs of a pod on this hardware, such as h100x8 or h100x8-sglang; 1 for other names."""
    named = HARDWARE.fullmatch(hardware.partition("-")[0])
    return int(named["count"]) if named else 1


class SpeedPrior(Strict):
    """One (model, hardware) row: fitted coefficients and their source."""

    c0_ms: float
    c1_ms_per_token: PositiveFloat
    c2_ms_per_token2: NonNegativeFloat
    d0_ms: NonNegativeFloat = 0.0
    d1_ms_per_request: NonNegativeFloat = 0.0
    d2_ms_per_context_token: NonNegativeFloat = 0.0
    launch_ms: NonNegativeFloat = 0.0
    replay_ms: NonNegativeFloat = 0.0
    graph_tokens: NonNegativeInt = 512
    source: str

    def speed(self) -> PodSpeed:
        """The row as a core value. A negative constant is an artefact of the fit and becomes zero."""
        return PodSpeed(**self.model_dump(exclude={"source"}) | {"c0_ms": max(self.c0_ms, 0.0)})


class ModelPrior(Strict):
    """`config/models/NAME.yaml`."""

    name: str
    kv_bytes_per_token: PositiveInt
    hardware: dict[str, SpeedPrior]


class GpuPrior(Strict):
    """The throughput of one GPU in prefill, for models without a fitted row."""

    c0_ms: NonNegativeFloat
    prefill_tflops: PositiveFloat
    attention_tflops: PositiveFloat
    source: str


class GpuPriors(Strict):
    """`config/hardware/gpus.yaml`."""

    gpus: dict[str, GpuPrior]


def load_priors(folder: Path) -> dict[str, ModelPrior]:
    """All model priors by name. Raises `ConfigError`, also if a file is not named after its model."""
    priors = {}
    for path in sorted(folder.glob("*.yaml")):
        prior = load(path, ModelPrior)
        if prior.name != path.stem:
            raise ConfigError(f"{path}:1: name: {prior.name!r} must equal the file's name")
        priors[prior.name] = prior
    return priors


def all_priors(own_folder: str | None) -> dict[str, ModelPrior]:
    """The shipped priors, overridden by those of the user's folder. Raises `ConfigError`."""
    own = Path(own_folder) if own_folder else None
    if own and not own.is_dir():
        raise ConfigError(f"priors: {own} is not a folder")
    return load_priors(shipped("config") / "models") | (load_priors(own) if own else {})


def load_gpus() -> dict[str, GpuPrior]:
    """The shipped GPU priors by name. Raises `ConfigError`."""
    return load(shipped("config") / "hardware" / "gpus.yaml", GpuPriors).gpus


def prior_speed(priors: Mapping[str, ModelPrior], cost: CostPrior, hardware: str = "") -> PodSpeed:
    """Coefficients of `cost.model` on `hardware`, by default on `cost.hardware`. Raises `ConfigError`."""
    model = _model(priors, cost)
    wanted = hardware or cost.hardware
    row = model.hardware.get(wanted)
    if row is None:
        known = f"{nearest(wanted, model.hardware)}; known: {', '.join(sorted(model.hardware))}"
        raise ConfigError(
            f"hardware: no prior of {cost.model!r} on {'this hardware' if hardware else repr(wanted)}{known}"
        )
    return row.speed()


class PodPriors:
    """The prior of each pod, taken from the configured model that it serves. If that is unknown, from the only
    configured model, or else from the default of `models[].cost`."""

    def __init__(self, models: Iterable[ModelConfig], priors: Mapping[str, ModelPrior]) -> None:
        self._priors = priors
        listed = tuple(models)
        self._names = ModelNames(listed)
        self._costs = [model.cost_row for model in listed]
        (self._other,) = self._costs if len(self._costs) == 1 else (CostPrior(),)

    def of(self, pod: PodConfig, served: Iterable[str]) -> tuple[PodSpeed, int]:
        """(speed, KV bytes per token) of a pod that serves these models. `pod.speed` overrides every row. If the model
        has no row for the pod's hardware, its row for `cost.hardware` is used; raises `ConfigError` if no configured
        model has one."""
        costs = self._costs or [self._other]
        if not pod.speed and not any(self._has_row(cost, pod.hardware) for cost in costs):
            prior_speed(self._priors, costs[0], pod.hardware)
        cost = next((model.cost_row for model in map(self._names.entry_of, served) if model), self._other)
        hardware = pod.hardware if self._has_row(cost, pod.hardware) else ""
        speed = pod.speed or prior_speed(self._priors, cost, hardware)
        return speed, _model(self._priors, cost).kv_bytes_per_token

    def gpus_of(self, hardware: str, served: Iterable[str]) -> int:
        """The GPUs of a pod that serves these models, by its hardware; without one, by that of its model's cost."""
        cost = next((model.cost_row for model in map(self._names.entry_of, served) if model), self._other)
        return gpu_count(hardware or cost.hardware)

    def _has_row(self, cost: CostPrior, hardware: str) -> bool:
        return (hardware or cost.hardware) in _model(self._priors, cost).hardware


def without_cost(models: Iterable[ModelConfig]) -> dict[str, str]:
    """What each model without `cost` starts with, and what to do."""
    row = CostPrior()
    start = f"starts with the speed of {row.model} on {row.hardware}"
    hint = f"{start}; name its own row, or write one with `warmroute prior`"
    return {model.name: hint for model in models if model.cost is None}


def _model(priors: Mapping[str, ModelPrior], cost: CostPrior) -> ModelPrior:
    model = priors.get(cost.model)
    if model is None:
        known = f"{nearest(cost.model, priors)}; known: {', '.join(sorted(priors))}"
        raise ConfigError(f"cost.model: no prior named {cost.model!r}{known}")
    return model
