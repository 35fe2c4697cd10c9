"""The commands that check configuration and print priors that the router can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.config.models import ModelPrior, load_priors
from tests.config.architectures import DEEPSEEK_V3, GPT_OSS_120B, LLAMA_8B
from tests.kit.command_line import Typed


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("links: {elsewhere: rdma}", "links.elsewhere: unknown link class 'rdma'; did you mean 'rdma_"),
        ("models: [{name: m, cost: {model: gpt-2}}]", "cost.model: no prior named 'gpt-2'; known: "),
        ("policy: cheapest", "unknown policy 'cheapest'; known: "),
    ],
)
def test_names_of_other_files_are_checked(typed: Typed, tmp_path: Path, text: str, what: str) -> None:
    """Link classes, cost priors and policies; exit code 2."""
    path = tmp_path / "router.yaml"
    path.write_text(text)
    ended = typed("config", "check", path)
    assert ended.code == 2 and what in ended.err


def test_a_valid_configuration_is_summarized(typed: Typed, tmp_path: Path) -> None:
    """Exit code 0."""
    path = tmp_path / "router.yaml"
    path.write_text("pods: [{url: 'http://a:8000', role: prefill, handoff: nixl}]\nlinks: {elsewhere: rdma_100}\n")
    ended = typed("config", "check", path)
    assert ended.code == 0 and "valid. 0 models, 1 pod, policies cost_aware." in ended.out
    (tmp_path / "key").write_text("sesame")
    hosted = "{name: h, url: 'https://a', model: m, key_file: key, price: {prompt: 1, output: 1}, budget_per_hour: 1}"
    path.write_text(f"providers: [{hosted}]\n")
    assert "valid. 0 models, 0 pods, 1 provider, policies cost_aware." in typed("config", "check", path).out


def test_pods_of_discovery_are_said_to_be_unchecked(typed: Typed, tmp_path: Path) -> None:
    """`0 pods` alone would look like a mistake."""
    path = tmp_path / "router.yaml"
    path.write_text("discovery: {dns: {name: pods.example.com, port: 8000}}\n")
    ended = typed("config", "check", path)
    assert ended.code == 0 and "note: the pods of `discovery` are not looked up; `--probe` does." in ended.out


def test_a_model_without_cost_is_noted(typed: Typed, tmp_path: Path) -> None:
    """With the row that it starts with. The configuration is valid."""
    path = tmp_path / "router.yaml"
    path.write_text("models: [{name: m}, {name: q, cost: {model: qwen3-32b, hardware: h100x2}}]\n")
    ended = typed("config", "check", path)
    (note,) = [line for line in ended.out.splitlines() if line.startswith("note: ")]
    assert ended.code == 0
    assert note.startswith("note: model m has no `cost`: it starts with the speed of llama-3.1-8b on h100x1; name its")


# --- prior ---


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder My-Model with the configuration of Llama-3.1-8B."""
    return write(tmp_path / "My-Model", LLAMA_8B)


def write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def as_file(printed: str, folder: Path, name: str) -> ModelPrior:
    """The output, read by the router."""
    folder.mkdir()
    (folder / f"{name}.yaml").write_text(printed)
    return load_priors(folder)[name]


def test_the_output_is_a_prior_named_after_the_folder(typed: Typed, model: Path, tmp_path: Path) -> None:
    """With a row for each requested hardware, marked as an estimate."""
    ended = typed("prior", model, "--hardware", "h100x1", "--hardware", "a100x2")
    assert ended.code == 0, ended.err
    prior = as_file(ended.out, tmp_path / "models", "my-model")
    assert prior.kv_bytes_per_token == 131_072
    assert list(prior.hardware) == ["h100x1", "a100x2"]
    assert prior.hardware["h100x1"].c1_ms_per_token == pytest.approx(0.0203, rel=0.3)
    assert all(row.source.startswith("estimate") for row in prior.hardware.values())


@pytest.mark.parametrize("which", ["My-Model/config.json", "My-Model", "llama.json"])
def test_the_argument_is_a_file_or_its_folder(typed: Typed, model: Path, tmp_path: Path, which: str) -> None:
    """The name is that of the file, or of the folder of a config.json."""
    (tmp_path / "llama.json").write_text((model / "config.json").read_text())
    ended = typed("prior", tmp_path / which)
    assert ended.code == 0, ended.err
    assert f'name: "{"llama" if which == "llama.json" else "my-model"}"\n' in ended.out


def test_the_name_can_be_given(typed: Typed, model: Path) -> None:
    """For a folder with the name of a revision, as in the hub's cache."""
    assert 'name: "llama-3.1-8b"\n' in typed("prior", model, "--name", "llama-3.1-8b").out


def test_dtype_and_ranks_determine_the_size(typed: Typed, tmp_path: Path) -> None:
    """The row has the same number of GPUs; copies are explained."""
    ended = typed("prior", write(tmp_path / "mla", DEEPSEEK_V3), "--kv-dtype", "fp8", "--tp", "4")
    assert "kv_bytes_per_token: 140544\n" in ended.out
    assert "# KV in fp8; 4 equal copies" in ended.out
    assert "  h100x4:\n" in ended.out


def test_a_fitted_row_replaces_an_estimate(typed: Typed, tmp_path: Path) -> None:
    """If config/models has that model on that hardware."""
    ended = typed("prior", write(tmp_path / "deepseek-v3", DEEPSEEK_V3), "--hardware", "h200x8")
    row = as_file(ended.out, tmp_path / "models", "deepseek-v3").hardware["h200x8"]
    assert (row.c0_ms, row.d0_ms) == (46.22, 16.72) and row.source.startswith("fitted")


def test_kv_of_fixed_size_is_explained_in_a_comment(typed: Typed, tmp_path: Path) -> None:
    """Windows, and layers with a state."""
    windowed = typed("prior", write(tmp_path / "windowed", GPT_OSS_120B)).out
    assert "kv_bytes_per_token: 36864\n" in windowed
    assert "# Layers with a window of 128 tokens keep at most 4718592 bytes." in windowed
    assert "Engines that treat all layers alike keep 73728 bytes per token" in windowed
    hybrid = typed("prior", write(tmp_path / "hybrid", {"model_type": "qwen3_next", "num_hidden_layers": 8})).out
    assert "# 6 layers keep a state of fixed size" in hybrid


def test_the_size_of_a_model_with_only_windows(typed: Typed, tmp_path: Path) -> None:
    """Valid for prompts within the window."""
    config = {**LLAMA_8B, "model_type": "mistral", "sliding_window": 4096, "max_position_embeddings": 32768}
    printed = typed("prior", write(tmp_path / "mistral", config)).out
    assert "kv_bytes_per_token: 131072\n" in printed
    assert "# All layers have one: the figure holds for prompts within the window." in printed


@pytest.mark.parametrize(
    ("config", "kv_bytes"),
    [
        ({"model_type": "gemma2", "num_hidden_layers": 42, "hidden_size": 3584}, 21 * 2 * 4 * 256 * 2),
        ({"model_type": "gpt2"}, 12 * 2 * 768 * 2),
        ({"model_type": "jamba"}, 4 * 2 * 8 * 128 * 2),
        ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 34}}, 5 * 2 * 4 * 256 * 2),
        ({**LLAMA_8B, "model_type": "unknown"}, 131_072),
    ],
)
def test_missing_keys_get_the_defaults_of_the_architecture(
    typed: Typed, tmp_path: Path, config: dict[str, Any], kv_bytes: int
) -> None:
    """As in transformers. An unknown architecture gets none."""
    folder = write(tmp_path / "model", {"intermediate_size": 4096, **config})
    assert f"kv_bytes_per_token: {kv_bytes}\n" in typed("prior", folder).out


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "model/config.json: cannot be read"),
        ("[]", "model/config.json: not a JSON object"),
        ("{", "model/config.json: cannot be read"),
        ('{"model_type": "llama", "hidden_size": "many"}', "model/config.json: not a valid configuration of 'llama'"),
        ('{"model_type": "nobody"}', "num_hidden_layers: missing, but needed for architecture 'nobody'"),
    ],
)
def test_an_invalid_file_ends_with_exit_code_2(typed: Typed, tmp_path: Path, content: str | None, what: str) -> None:
    """Nothing is printed to stdout."""
    (tmp_path / "model").mkdir()
    if content is not None:
        (tmp_path / "model" / "config.json").write_text(content)
    ended = typed("prior", tmp_path / "model")
    assert (ended.code, ended.out) == (2, "") and what in ended.err


def test_unknown_hardware_prints_nothing(typed: Typed, model: Path) -> None:
    """Even after a known one."""
    ended = typed("prior", model, "--hardware", "h100x1", "--hardware", "abacus")
    assert (ended.code, ended.out) == (2, "") and "known GPUs: a100, h100, h200" in ended.err


def test_a_hub_name_is_looked_up_in_the_cache_only(typed: Typed) -> None:
    """Without a network."""
    ended = typed("prior", "nobody/no-such-model")
    assert ended.code == 2 and "nobody/no-such-model: not a file or folder, and not in the hub's cache" in ended.err
