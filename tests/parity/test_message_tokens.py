"""Compares the router's tokens for `/v1/messages` with those of a real vLLM.

Bodies and digests of their tokens are recorded by `tests/live/record_goldens.py messages`.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from xxhash import xxh3_64_hexdigest

from router.engines.engine_catalog import ENGINES
from router.prompt.fingerprint import Fingerprinter
from router.prompt.template import ChatTemplate
from router.types import Endpoint, Generation, InferenceRequest
from router.wiring.tokenizer_files import TokenizerSource, load_tokenizer
from tests.parity.test_chat_tokens import DEMO, GOLDENS, QWEN3

STRICT = Path(__file__).parents[1] / "live" / "strict.jinja"
SOURCES = {
    "tiny-llama": DEMO,
    "strict": TokenizerSource(DEMO.path, str(STRICT)),
    "tiny-qwen3": TokenizerSource(str(QWEN3)),
}
PROMPT_FIELDS = {"messages", "system", "tools", "thinking", "output_config", "chat_template_kwargs"}


def recorded(name: str) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (GOLDENS / f"vllm_messages_{name}.jsonl").read_text("utf-8").split("\n") if line
    ]


def as_received(body: dict[str, Any]) -> dict[str, Any]:
    """The prompt's fields as the edge leaves them: undecoded."""
    raw: dict[str, Any] = {
        name: msgspec.Raw(json.dumps(value).encode()) for name, value in body.items() if name in PROMPT_FIELDS
    }
    return raw | {"messages": [msgspec.Raw(json.dumps(message).encode()) for message in body["messages"]]}


@pytest.mark.parametrize("name", SOURCES)
def test_messages_have_the_tokens_that_vllm_gave_them(name: str) -> None:
    """Hundreds of bodies of every kind, by three templates; one of them refuses late system messages."""
    if name == "tiny-qwen3" and not (QWEN3 / "tokenizer.json").is_file():
        pytest.skip(f"no Qwen3 tokenizer in {QWEN3}: tests/live/install.sh gets it")
    tokenizer = load_tokenizer(SOURCES[name], fast=True)
    fingerprinter = Fingerprinter(tokenizer, ChatTemplate(tokenizer), Generation(model="tiny"))
    cases = recorded(name)
    assert len(cases) >= 100
    for case in cases:
        request = InferenceRequest(
            id="r", endpoint=Endpoint.MESSAGES, model="tiny", body=b"", prompt=as_received(case["body"])
        )
        tokens = array("I", fingerprinter.fingerprint(request, ENGINES["vllm"].conversions[Endpoint.MESSAGES]).tokens)
        assert (len(tokens), xxh3_64_hexdigest(tokens.tobytes())) == (case["tokens"], case["digest"]), case["body"]
