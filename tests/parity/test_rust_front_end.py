"""The router reads recorded chats as each front end of vLLM 0.33 does: the one in Python and the one in Rust.

The vectors are not part of the repository: without them, or without the tokenizer of a model, its tests are skipped.
"""

from __future__ import annotations

import json
from array import array
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from router.config.tokenizer_files import TokenizerSource
from router.errors import ConfigError, MalformedRequest
from router.prompt import minijinja, sandbox
from router.prompt.apis.conversion import Conversion
from router.prompt.apis.vllm_rust_chat import VllmRustChat
from router.prompt.conversation import Unrenderable
from router.prompt.fingerprint import Fingerprinter
from router.prompt.harmony import Harmony, SeparateTexts
from router.prompt.template import ChatTemplate
from router.request.parse import PARSERS
from router.types import Endpoint, Generation, InferenceRequest
from tests.kit import scenes
from tests.loaded_tokenizers import loaded_tokenizer
from tests.parity.test_chat_tokens import DEMO, QWEN3
from tests.parity.test_harmony_tokens import ENCODING, SPECIAL

PATH = Path(__file__).parents[3] / "shared" / "data" / "rust_frontend_vectors.json"
VECTORS: dict[str, Any] = json.loads(PATH.read_text("utf-8")) if PATH.is_file() else {}
if not VECTORS:
    pytest.skip("no vectors of the front end in Rust", allow_module_level=True)
FRONT_ENDS: dict[str, type[Conversion] | None] = {"rust": VllmRustChat, "python": None}
SOURCES = {
    "qwen3": TokenizerSource(str(QWEN3)),
    "llama3_2": TokenizerSource(str(QWEN3.with_name("llama3_2"))),
    "deepseek": DEMO,
}
RECORDED_AT = datetime(2026, 11, 28)
SHORTENED = "truncate_prompt_tokens"
"""Prompts that the engine shortens are not read."""
UNREAD_FEATURES = {"include", "attr filter", "compare str int", "strftime odd"}
"""Templates that no model has: their chats have no prefix in Rust."""
CASES = [(kind, case) for kind, cases in VECTORS["chats"].items() for case in cases]


@pytest.fixture
def recorded_date(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sandbox, minijinja):
        monkeypatch.setitem(module._ENVIRONMENT.globals, "strftime_now", RECORDED_AT.strftime)


def parsed(body: str) -> InferenceRequest:
    endpoint = Endpoint.CHAT if '"messages"' in body else Endpoint.COMPLETIONS
    fields = PARSERS[endpoint].prompt_fields(PARSERS[endpoint].parse(body.encode()))
    return scenes.request(endpoint=endpoint, model="tiny", body=body.encode(), prompt=fields)


def read(fingerprinter: Fingerprinter, body: str, front_end: str) -> list[int] | None:
    """The tokens; None where the router refuses the body or does not read it."""
    try:
        request = parsed(body)
        conversion = FRONT_ENDS[front_end] if request.endpoint is Endpoint.CHAT else None
        return list(fingerprinter.fingerprint(request, conversion).tokens)
    except (MalformedRequest, Unrenderable, UnicodeError):
        return None


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("model", SOURCES)
def test_chats_have_the_tokens_of_each_front_end(model: str, front_end: str, recorded_date: None) -> None:
    source = SOURCES[model]
    if model != "deepseek" and not (Path(source.path) / "tokenizer.json").is_file():
        pytest.skip(f"no tokenizer in {source.path}: tests/live/install.sh gets it")
    tokenizer = loaded_tokenizer(source)
    fingerprinter = Fingerprinter(tokenizer, ChatTemplate(tokenizer), Generation(model="tiny"))
    compare(lambda body: read(fingerprinter, body, front_end), model, front_end)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_gpt_oss_has_the_tokens_of_each_front_end(front_end: str) -> None:
    harmony = Harmony(SPECIAL, lambda: f"{RECORDED_AT:%Y-%m-%d}")

    def tokens(body: str) -> list[int] | None:
        try:
            request = parsed(body)
            conversion = VllmRustChat(harmony) if front_end == "rust" else None
            if request.endpoint is not Endpoint.CHAT or SHORTENED in body:
                return None
            chat = conversion.template_body(request.prompt) if conversion else json.loads(body)
            rendered = (conversion.template if conversion else harmony).render(chat)
        except (MalformedRequest, Unrenderable, ValueError):
            return None
        assert isinstance(rendered, SeparateTexts)
        return [*array("I", [one for text in rendered.texts for one in ENCODING.encode(text, allowed_special="all")])]

    compare(tokens, "gptoss", front_end, has_completions=False)


def compare(tokens: Any, model: str, front_end: str, *, has_completions: bool = True) -> None:
    """Every prompt is equal, or not read where the engine refuses or shortens it."""
    equal = 0
    for kind, case in CASES:
        expected = case.get(front_end, case["rust"])
        if case["model"] != model or not isinstance(expected, list):
            continue
        ours = tokens(case["body"])
        is_unread = (
            SHORTENED in case["body"] or kind == "empty prompt" or (kind == "completion" and not has_completions)
        )
        assert ours == expected or (ours is None and is_unread), (kind, case["body"])
        equal += ours is not None
    assert equal > 20


def rendered(template: str, body: dict[str, Any], front_end: str) -> str | None:
    try:
        found = ChatTemplate(loaded_tokenizer(DEMO), template)
        found.special_tokens = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        if front_end == "python":
            return found.render(body)
        conversion = VllmRustChat(found)
        return str(conversion.template.render(conversion.template_body(body)))
    except (ConfigError, MalformedRequest, Unrenderable):
        return None


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_templates_print_what_each_front_end_prints(front_end: str) -> None:
    """In one recording a template was printed without vLLM: its renderer puts the role first, as tests/live/ shows."""
    cases = [case for case in VECTORS["templates"] if (case["name"], front_end) != ("message order", "python")]
    for case in cases:
        expected = case.get(front_end, case["rust"])
        text = rendered(case["template"], case["body"], front_end)
        assert text == expected or expected.startswith(("400", "ERROR")), case["name"]


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_each_feature_of_templates_prints_what_each_front_end_prints(front_end: str) -> None:
    body = {"messages": VECTORS["feature_chat"], "tools": VECTORS["feature_tools"]}
    for case in VECTORS["features"]:
        expected = case.get(front_end, case["rust"])
        text = rendered(case["template"], body, front_end)
        is_unread = text is None and front_end == "rust" and case["name"] in UNREAD_FEATURES
        assert text == expected or expected.startswith("ERROR") or is_unread, case["name"]
