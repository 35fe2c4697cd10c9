"""Which models' pictures are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from router.config.schema import ModelConfig
from router.errors import ConfigError
from router.frontends.prompts import chat_template, picture_reader
from router.prompt.pictures.picture_reader import PLACEHOLDER
from router.prompt.tokenizer import Tokenizer
from tests.prompt.conftest import ZOO

QWEN = {"image_processor_type": "Qwen2VLImageProcessor", "max_pixels": 12845056}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def backend() -> Backend:
    return ZOO["byte level, NFC"]()


def tokenizer_of(backend: Backend, *special: str) -> Tokenizer:
    copy = Backend.from_str(backend.to_str())
    copy.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return Tokenizer(copy, "f", {}, TEMPLATE)


def model_at(folder: Path, processor: Any = None) -> ModelConfig:
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(
            processor if isinstance(processor, str) else json.dumps(processor)
        )
    return ModelConfig(name="m", tokenizer=str(folder))


def test_the_family_is_known_by_its_processor_and_placeholder(backend: Backend, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(backend, PLACEHOLDER)
    model = model_at(tmp_path, QWEN)
    reader = picture_reader(model, tokenizer)
    assert reader is not None and [reader.placeholder] == list(tokenizer.encode(PLACEHOLDER))
    template = chat_template(model, tokenizer)
    assert template is not None and template.pictures is not None


@pytest.mark.parametrize("processor", [None, {}, [], {"image_processor_type": "CLIPImageProcessor"}])
def test_other_models_have_no_reader(backend: Backend, tmp_path: Path, processor: Any) -> None:
    tokenizer = tokenizer_of(backend, PLACEHOLDER)
    assert picture_reader(model_at(tmp_path, processor), tokenizer) is None
    template = chat_template(model_at(tmp_path, processor), tokenizer)
    assert template is not None and template.pictures is None


def test_a_tokenizer_without_the_placeholder_has_no_reader(backend: Backend, tmp_path: Path) -> None:
    assert picture_reader(model_at(tmp_path, QWEN), tokenizer_of(backend)) is None


def test_a_broken_processor_is_an_error(backend: Backend, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json"):
        picture_reader(model_at(tmp_path, "{"), tokenizer_of(backend, PLACEHOLDER))
