"""Cost priors: rows of files, or estimates marked as such."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.priors.architecture import kv_size, prefill_work
from loadtest.priors.estimate import estimated_row, load_gpus
from router.config.load import shipped
from router.config.models import (
    PodPriors,
    SpeedPrior,
    all_priors,
    load_priors,
    prior_speed,
)
from router.config.pod_schema import PodConfig
from router.config.schema import CostPrior, ModelConfig
from router.errors import ConfigError
from router.types import PodSpeed
from tests.config.architectures import ARCHITECTURES

PRIORS = load_priors(shipped("config") / "models")
GPUS = load_gpus()
LLAMA = CostPrior(model="llama-3.1-8b", hardware="h100x1")
QWEN = CostPrior(model="qwen3-32b", hardware="h100x2")
FITTED = Path(__file__).parents[3] / "shared" / "data" / "prefill_fit_coefficients.json"
MODELS = {
    "L8B": "llama-3.1-8b",
    "Q32B": "qwen3-32b",
    "L70B": "llama-3.1-70b",
    "L70B-FP8": "llama-3.1-70b-fp8",
    "gptoss120B": "gpt-oss-120b",
    "Q30BA3B": "qwen3-30b-a3b",
    "DSV3": "deepseek-v3",
    "Q235B-FP8": "qwen3-235b-fp8",
}
KEYS = {
    "c0": "c0_ms",
    "c1": "c1_ms_per_token",
    "c2": "c2_ms_per_token2",
    "d0": "d0_ms",
    "d1": "d1_ms_per_request",
    "d2": "d2_ms_per_context_token",
}


def row_of(label: str) -> tuple[str, str]:
    """Model and hardware of a fit: `Q32B/H100x2 sglang` is h100x2-sglang of qwen3-32b."""
    model, _, where = label.partition("/")
    hardware, *rest = where.lower().split()
    return MODELS[model], "-".join([hardware, *(word for word in rest if word == "sglang")])


def test_a_prior_is_chosen_by_model_and_hardware() -> None:
    """A pod's hardware overrides the model's. Unknown names are reported with the known ones."""
    priors = load_priors(shipped("config") / "models")
    cost = CostPrior(model="llama-3.1-8b", hardware="h100x1")
    assert prior_speed(priors, cost).c1_ms_per_token == 0.02028
    assert prior_speed(priors, cost, "h200x1").launch_ms == 22.3
    with pytest.raises(ConfigError, match=r"known: .*qwen3-32b"):
        prior_speed(priors, CostPrior(model="gpt-2"))
    with pytest.raises(ConfigError, match="known: a100x1, h100x1, h200x1"):
        prior_speed(priors, cost, "tpu")


def test_a_negative_constant_is_an_artefact_of_a_fit() -> None:
    assert SpeedPrior(c0_ms=-0.2, c1_ms_per_token=0.02, c2_ms_per_token2=0.0, source="fitted").speed().c0_ms == 0.0


def priors_of(**costs: CostPrior) -> PodPriors:
    return PodPriors([ModelConfig(name=name, cost=cost) for name, cost in costs.items()], PRIORS)


def test_a_pod_has_the_speed_of_its_hardware_and_the_kv_of_its_model() -> None:
    """A speed of its own overrides every row, also on hardware without a row."""
    pod = PodConfig(url="http://a", hardware="a100x1")
    priors = priors_of(llama=LLAMA)
    assert priors.of(pod, ["llama"]) == (prior_speed(PRIORS, LLAMA, "a100x1"), 131_072)
    own = PodSpeed(1.0, 2.0, 3.0)
    assert priors.of(PodConfig(url="http://a", hardware="tpu", speed=own), ["llama"]) == (own, 131_072)


def test_each_pod_has_the_prior_of_the_model_it_serves() -> None:
    """By any of its served names that is configured. Hardware without a row of that model: the model's own hardware."""
    priors, pod = priors_of(llama=LLAMA, qwen=QWEN), PodConfig(url="http://a")
    assert priors.of(pod, ["llama"])[0] == prior_speed(PRIORS, LLAMA)
    assert priors.of(pod, ["alias", "qwen"])[0] == prior_speed(PRIORS, QWEN)
    assert priors.of(pod, ["qwen"])[1] == PRIORS["qwen3-32b"].kv_bytes_per_token
    on_a100 = PodConfig(url="http://a", hardware="a100x1")
    assert priors.of(on_a100, ["llama"])[0] == prior_speed(PRIORS, LLAMA, "a100x1")
    assert priors.of(on_a100, ["qwen"])[0] == prior_speed(PRIORS, QWEN)


def test_a_pod_of_an_unknown_model_has_the_prior_of_the_only_model_or_the_default() -> None:
    """Before its models are read, or when none of them is configured."""
    pod = PodConfig(url="http://a")
    assert priors_of(qwen=QWEN).of(pod, [])[0] == prior_speed(PRIORS, QWEN)
    for priors in (priors_of(), priors_of(qwen=QWEN, other=QWEN)):
        assert priors.of(pod, ["unknown"])[0] == prior_speed(PRIORS, CostPrior())


def test_hardware_needs_a_row_of_some_configured_model() -> None:
    """Which model a pod serves is not known when the configuration is read."""
    priors = priors_of(llama=LLAMA, qwen=QWEN)
    priors.of(PodConfig(url="http://a", hardware="a100x1"), ())
    priors.of(PodConfig(url="http://a", hardware="tpu", speed=PodSpeed(1.0, 2.0, 3.0)), ())
    with pytest.raises(ConfigError, match=r"no prior of 'llama-3.1-8b' on this hardware"):
        priors.of(PodConfig(url="http://a", hardware="tpu"), ())


@pytest.mark.parametrize(
    ("hardware", "gpus"), [("h100x8", 8), ("h200x8-sglang", 8), ("a100x16", 16), ("tpu", 1), ("x0", 1), ("h100x1", 1)]
)
def test_the_name_of_a_pods_hardware_says_how_many_gpus_it_has(hardware: str, gpus: int) -> None:
    assert priors_of().gpus_of(hardware, ()) == gpus


def test_a_pod_without_hardware_has_the_gpus_of_its_models_cost() -> None:
    large = CostPrior(model="llama-3.1-70b", hardware="h100x4")
    assert priors_of(llama=large, qwen=QWEN).gpus_of("", ["llama"]) == 4
    assert priors_of(llama=large).gpus_of("", []) == 4
    assert priors_of(llama=large).gpus_of("h100x8", ["llama"]) == 8


@pytest.mark.skipif(
    not FITTED.is_file(), reason="the fits that config/models was made from are not part of the product"
)
def test_every_row_equals_its_fit_to_four_digits() -> None:
    """There are no other rows or coefficients, but measured ones."""
    rows = {(name, hardware): row for name, prior in PRIORS.items() for hardware, row in prior.hardware.items()}
    rows = {which: row for which, row in rows.items() if not row.source.startswith("measured")}
    fits = {row_of(label): fit for label, fit in json.loads(FITTED.read_text()).items()}
    assert set(rows) == fits.keys() - {("llama-3.1-8b", "h200x1")}
    for which, row in rows.items():
        written = row.model_dump(exclude_unset=True, exclude={"source"})
        assert written == pytest.approx({KEYS[key]: value for key, value in fits[which].items()}, rel=6e-4), which


def test_every_file_has_the_kv_of_its_architecture() -> None:
    """As for an engine that treats all layers alike."""
    assert PRIORS.keys() == ARCHITECTURES.keys()
    for name, architecture in ARCHITECTURES.items():
        kv = kv_size(architecture)
        assert PRIORS[name].kv_bytes_per_token == kv.bytes_per_token + kv.window_bytes_per_token


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_estimates_are_within_their_stated_accuracy(model: str) -> None:
    """Within a factor of 3.2 for c1 and 1.4 for c2 of every row that is fitted to kernels; measured ones contain
    launches."""
    work = prefill_work(ARCHITECTURES[model])
    fitted = {name: row for name, row in PRIORS[model].hardware.items() if not row.source.startswith("measured")}
    for hardware, row in fitted.items():
        estimate = estimated_row(work, hardware.removesuffix("-sglang"), GPUS)
        assert 1 / 3.2 < estimate.c1_ms_per_token / row.c1_ms_per_token < 3.2
        assert 1 / 1.4 < estimate.c2_ms_per_token2 / row.c2_ms_per_token2 < 1.4
        assert "estimate" in estimate.source and "factor of 3.2" in estimate.source


def test_twice_the_gpus_halve_the_estimate() -> None:
    """That holds for the terms that depend on the prompt."""
    work = prefill_work(ARCHITECTURES["llama-3.1-70b"])
    two, four = (estimated_row(work, hardware, GPUS) for hardware in ("a100x2", "a100x4"))
    assert two.c1_ms_per_token == 2 * four.c1_ms_per_token
    assert two.c2_ms_per_token2 == 2 * four.c2_ms_per_token2


@pytest.mark.parametrize("hardware", ["b9000x1", "h100", "h100x0", "h100x1-sglang", "xh100x1", ""])
def test_unknown_hardware_has_no_estimate(hardware: str) -> None:
    """The message lists the known GPUs."""
    with pytest.raises(ConfigError, match="such as h100x4; known GPUs: a100, h100, h200"):
        estimated_row(prefill_work(ARCHITECTURES["qwen3-32b"]), hardware, GPUS)


def test_priors_of_the_user_override_the_shipped_ones(tmp_path: Path) -> None:
    """The other shipped ones stay."""
    row = "{c0_ms: 1, c1_ms_per_token: 0.5, c2_ms_per_token2: 0, source: here}"
    for name in ("llama-3.1-8b", "ours"):
        text = f"name: {name}\nkv_bytes_per_token: 7\nhardware: {{h100x1: {row}}}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    priors = all_priors(str(tmp_path))
    assert {priors[name].kv_bytes_per_token for name in ("llama-3.1-8b", "ours")} == {7}
    assert set(priors) == {*PRIORS, "ours"}
    assert all_priors(None) == PRIORS


def test_a_missing_folder_of_priors_is_reported(tmp_path: Path) -> None:
    """With its key."""
    with pytest.raises(ConfigError, match=r"priors: .*nowhere"):
        all_priors(str(tmp_path / "nowhere"))
