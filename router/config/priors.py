"""How fast is this model on this hardware, and how much KV does it leave, before we have measured it?

Reads `config/models/*.yaml`, and for models that have no file there `config/hardware/gpus.yaml`. Online calibration
replaces these numbers; this file never does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from router.config.architecture import PrefillWork
from router.config.load import load
from router.config.schema import CostPrior, GpuPrior, GpuPriors, ModelPrior, PodConfig, SpeedPrior
from router.config.shipped import shipped
from router.errors import ConfigError
from router.types import PodSpeed

_FLOP_PER_MS_PER_TFLOPS = 1e9
_HARDWARE = re.compile(r"(?P<gpu>[a-z0-9]+)x(?P<count>[1-9][0-9]*)")
"""As rows are named: h100x4."""


def load_priors(folder: Path) -> dict[str, ModelPrior]:
    """All model priors by name. A file must be named after the model it describes."""
    priors = {}
    for path in sorted(folder.glob("*.yaml")):
        prior = load(path, ModelPrior)
        if prior.name != path.stem:
            raise ConfigError(f"{path}:1: name: {prior.name!r} must equal the file's name")
        priors[prior.name] = prior
    return priors


def all_priors(own_folder: str | None) -> dict[str, ModelPrior]:
    """The shipped ones, and those of a folder of the user's own, which go before them. Raises `ConfigError`."""
    own = Path(own_folder) if own_folder else None
    if own and not own.is_dir():
        raise ConfigError(f"priors: {own} is no folder")
    return load_priors(shipped("config") / "models") | (load_priors(own) if own else {})


def load_gpus(path: Path) -> dict[str, GpuPrior]:
    """All GPUs by name. Raises `ConfigError`."""
    return load(path, GpuPriors).gpus


def prior_speed(priors: Mapping[str, ModelPrior], cost: CostPrior, hardware: str = "") -> PodSpeed:
    """Coefficients of `cost.model` on `hardware` (or on the prior's own)."""
    model = _model(priors, cost)
    wanted = hardware or cost.hardware
    row = model.hardware.get(wanted)
    if row is None:
        known = ", ".join(sorted(model.hardware))
        raise ConfigError(f"hardware: no prior of {cost.model!r} on {wanted!r}; known: {known}")
    return row.speed()


def prior_of(priors: Mapping[str, ModelPrior], cost: CostPrior, pod: PodConfig) -> tuple[PodSpeed, int]:
    """Speed and KV bytes a token of a pod that serves `cost.model`; a `speed` of the pod's own goes before all rows."""
    return pod.speed or prior_speed(priors, cost, pod.hardware), _model(priors, cost).kv_bytes_per_token


def estimated_row(work: PrefillWork, hardware: str, gpus: Mapping[str, GpuPrior]) -> SpeedPrior:
    """A row for a model that nobody has fitted: its work by what such GPUs achieve. Says nothing of decode.

    `c1 = 2 active parameters / (GPUs F)`, `c2 = attention FLOP / (GPUs A)`, with F and A achieved in fitted rows."""
    named = _HARDWARE.fullmatch(hardware)
    if named is None or named["gpu"] not in gpus:
        raise ConfigError(f"hardware: {hardware!r} is not like h100x4; known GPUs: {', '.join(sorted(gpus))}")
    gpu, count = gpus[named["gpu"]], int(named["count"])
    return SpeedPrior(
        c0_ms=gpu.c0_ms,
        c1_ms_per_token=2 * work.active_parameters / (count * gpu.prefill_tflops * _FLOP_PER_MS_PER_TFLOPS),
        c2_ms_per_token2=work.attention_flop_per_token2 / (count * gpu.attention_tflops * _FLOP_PER_MS_PER_TFLOPS),
        source=f"estimate, good to a factor of 2.5, from {work.active_parameters / 1e9:.1f} billion active parameters "
        f"and what {named['gpu']} achieved in fitted rows; calibration replaces it",
    )


def _model(priors: Mapping[str, ModelPrior], cost: CostPrior) -> ModelPrior:
    model = priors.get(cost.model)
    if model is None:
        raise ConfigError(f"cost.model: no prior named {cost.model!r}; known: {', '.join(sorted(priors))}")
    return model
