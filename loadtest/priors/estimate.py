"""The speed of a model without a fitted prior, from the work of its architecture."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import NonNegativeFloat, PositiveFloat

from loadtest.priors.architecture import PrefillWork
from router.config.load import Strict, load, shipped
from router.config.models import HARDWARE, SpeedPrior
from router.errors import ConfigError

_FLOP_PER_MS_PER_TFLOPS = 1e9


class GpuPrior(Strict):
    """The throughput of one GPU in prefill, for models without a fitted row."""

    c0_ms: NonNegativeFloat
    prefill_tflops: PositiveFloat
    attention_tflops: PositiveFloat
    source: str


class GpuPriors(Strict):
    """`config/hardware/gpus.yaml`."""

    gpus: dict[str, GpuPrior]


def load_gpus() -> dict[str, GpuPrior]:
    """The shipped GPU priors by name. Raises `ConfigError`."""
    return load(shipped("config") / "hardware" / "gpus.yaml", GpuPriors).gpus


def estimated_row(work: PrefillWork, hardware: str, gpus: Mapping[str, GpuPrior]) -> SpeedPrior:
    """A row for a model without a fitted one, without decode coefficients.

    `c1 = 2 active parameters / (GPUs F)`, `c2 = attention FLOP / (GPUs A)`; F and A are achieved in fitted rows."""
    named = HARDWARE.fullmatch(hardware)
    if named is None or named["gpu"] not in gpus:
        known = ", ".join(sorted(gpus))
        raise ConfigError(f"hardware: {hardware!r} is not a known GPU and a count, such as h100x4; known GPUs: {known}")
    gpu, count = gpus[named["gpu"]], int(named["count"])
    return SpeedPrior(
        c0_ms=gpu.c0_ms,
        c1_ms_per_token=2 * work.active_parameters / (count * gpu.prefill_tflops * _FLOP_PER_MS_PER_TFLOPS),
        c2_ms_per_token2=work.attention_flop_per_token2 / (count * gpu.attention_tflops * _FLOP_PER_MS_PER_TFLOPS),
        source=f"estimate, good to a factor of 3.2, from {work.active_parameters / 1e9:.1f} billion active parameters "
        f"and the throughput of {named['gpu']} in fitted rows; calibration replaces it",
    )
