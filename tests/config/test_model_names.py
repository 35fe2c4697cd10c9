"""Settings of models that pods name: patterns, and folders whose names are those of models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from router.admission.tenant import Slo
from router.config.load import ENGINE_TOKENIZER
from router.config.models import (
    MAX_FOLDER_MODELS,
    MAX_NAME_CHARACTERS,
    ModelNames,
    PodPriors,
    all_priors,
    slo_lookup,
    with_model_folders,
)
from router.config.pod_schema import PodConfig
from router.config.router_file import load_router
from router.config.schema import QUEUE_SLO, CostPrior, ModelConfig, RouterConfig
from router.errors import ConfigError

OWN, ANY = Slo(ttft_ms=1.0), Slo(ttft_ms=2.0)


def models(*given: tuple[str, int]) -> tuple[ModelConfig, ...]:
    """Models by name and block size."""
    return tuple(ModelConfig(name=name, block_size_tokens=size, tokenizer="engine") for name, size in given)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("meta-llama/Llama-3.1-8B", 32),
        ("meta-llama/special", 8),
        ("meta-llama", 64),
        ("x[1]?", 1),
        ("x1y", 64),
        ("a" * MAX_NAME_CHARACTERS, 64),
        ("a" * (MAX_NAME_CHARACTERS + 1), None),
    ],
)
def test_an_own_entry_wins_then_the_first_pattern(name: str, size: int | None) -> None:
    """Only `*` is special in a pattern. The settings are those of a model with that name."""
    names = ModelNames(models(("*[1]?", 1), ("meta-llama/*", 32), ("*", 64), ("meta-llama/special", 8)))
    found = names.get(name)
    assert (found.block_size_tokens if found else None) == size
    assert found is None or found.name == found.generation().model == name


@pytest.mark.parametrize(
    ("name", "plain", "queued"), [("a", OWN, OWN), ("b-1", ANY, ANY), ("c", None, QUEUE_SLO), ("d", None, QUEUE_SLO)]
)
def test_a_model_has_the_slo_of_its_entry_or_that_of_the_queue(name: str, plain: Slo | None, queued: Slo) -> None:
    """The entry may be a pattern; `slo: {}` and a model without an entry have none."""
    listed = [{"name": "a", "slo": OWN}, {"name": "b-*", "slo": ANY}, {"name": "c", "slo": {}}]
    for admission, slo in ((None, plain), ({}, queued)):
        config = RouterConfig.model_validate({"models": listed, "admission": admission})
        assert slo_lookup(config)(name) == slo


def test_pods_of_a_pattern_start_with_its_cost() -> None:
    """As those of a listed model."""
    small, large = CostPrior(), CostPrior(model="llama-3.1-70b", hardware="h100x4")
    given_models = [ModelConfig(name="s*", cost=small), ModelConfig(name="*", cost=large)]
    priors = PodPriors(given_models, all_priors(None))
    pod = PodConfig(url="http://p:1")
    assert priors.of(pod, ["small-1"]) != priors.of(pod, ["big"]) == priors.of(pod, ["other"])


# --- folders ---


def tokenizers(root: Path, *names: str, inside: str = "") -> None:
    for name in names:
        (root / name / inside).mkdir(parents=True)
        (root / name / inside / "tokenizer.json").write_text("{}")


def found(root: Path, pattern: str = "*", rest: str = "", *others: ModelConfig) -> dict[str, str | None]:
    """Tokenizers that a pattern finds, by model."""
    entry = ModelConfig(name=pattern, tokenizer=f"{root}/{{model}}{rest}", block_size_tokens=32)
    config = with_model_folders(RouterConfig(models=(*others, entry)))
    added = config.models[len(others) + 1 :]
    assert all(model.block_size_tokens == 32 for model in added)
    return {model.name: model.tokenizer for model in added}


def test_each_folder_with_a_tokenizer_is_a_model(tmp_path: Path) -> None:
    """Its path below the folder is the name. Hidden folders are not models."""
    tokenizers(tmp_path, "qwen3", "meta-llama/Llama-3.1-8B", ".cache/qwen3")
    (tmp_path / "empty").mkdir()
    assert found(tmp_path) == {
        "qwen3": f"{tmp_path}/qwen3",
        "meta-llama/Llama-3.1-8B": f"{tmp_path}/meta-llama/Llama-3.1-8B",
    }
    assert found(tmp_path, "meta-llama/*").keys() == {"meta-llama/Llama-3.1-8B"}
    assert found(tmp_path, "*", "", *models(("qwen3", 16), ("meta*", 16))) == {}, "listed and earlier entries win"


def test_the_tokenizer_may_be_deeper_in_the_folder(tmp_path: Path) -> None:
    """As in a folder of weights."""
    tokenizers(tmp_path, "qwen3", inside="tokenizer")
    assert found(tmp_path, "*", "/tokenizer") == {"qwen3": f"{tmp_path}/qwen3/tokenizer"}


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    """Links inside it are: that is how Kubernetes mounts a ConfigMap."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    tokenizers(outside, "secret")
    tokenizers(root, "..data/mounted")
    (root / "away").symlink_to(outside)
    (root / "loop").symlink_to(root)
    (root / "mounted").symlink_to(root / "..data" / "mounted")
    assert set(found(root)) == {"mounted", "loop/mounted", "loop/loop/mounted"}


HOSTILE = ["..", "../secret", "/etc", "a/../../secret", "a/..", "secret\0", "~", "{model}", "%2e%2e/secret", "x\n"]


@given(st.sampled_from(HOSTILE) | st.text(max_size=40))
def test_names_of_pods_never_become_paths(name: str) -> None:
    """A model without a folder is tokenized by its pods."""
    names = ModelNames([ModelConfig(name="*", tokenizer="/models/{model}")])
    model = names.get(name)
    assert model is not None and model.tokenizer == ENGINE_TOKENIZER


def test_a_missing_folder_and_too_many_models_are_errors(tmp_path: Path) -> None:
    """Which say what to do."""
    with pytest.raises(ConfigError, match=f"{tmp_path}/none.*does not exist"):
        found(tmp_path / "none")
    tokenizers(tmp_path, *(f"m{number}" for number in range(MAX_FOLDER_MODELS + 1)))
    with pytest.raises(ConfigError, match="narrower pattern"):
        found(tmp_path)
    assert len(found(tmp_path, "m1*")) == 11


@pytest.mark.parametrize(
    ("name", "tokenizer"),
    [
        ("one", "/m/{model}"),
        ("*", "{model}"),
        ("*", "/m/v-{model}"),
        ("*", "/m/{model}x"),
        ("*", "/{model}/{model}"),
    ],
)
def test_a_folder_of_models_needs_a_pattern_and_a_folder_around_it(name: str, tokenizer: str) -> None:
    with pytest.raises(ValidationError, match=r"\{model\}"):
        ModelConfig(name=name, tokenizer=tokenizer)


def test_folders_are_relative_to_the_configuration_file(tmp_path: Path) -> None:
    """As all paths in it. The file may be JSON."""
    tokenizers(tmp_path / "tokenizers", "qwen3")
    path = tmp_path / "router.yaml"
    path.write_text(json.dumps({"models": [{"name": "*", "tokenizer": "tokenizers/{model}"}]}))
    assert [model.tokenizer for model in load_router(path).models] == [
        f"{tmp_path}/tokenizers/{{model}}",
        f"{tmp_path}/tokenizers/qwen3",
    ]
