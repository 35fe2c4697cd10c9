"""Compares the router's tokens for `/v1/messages` and `/v1/responses` with those of a real vLLM.

Bodies and digests of their tokens are recorded by `tests/live/record_goldens.py messages`.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_64_hexdigest

from router.config.tokenizer_files import TokenizerSource
from router.engines.engine_catalog import ENGINES
from router.prompt.fingerprint import Fingerprinter
from router.prompt.template import ChatTemplate
from router.request.parse import PARSERS
from router.types import Endpoint, Generation
from tests.kit import scenes
from tests.loaded_tokenizers import loaded_tokenizer
from tests.parity.test_chat_tokens import DEMO, GOLDENS, QWEN3

STRICT = Path(__file__).parents[1] / "live" / "strict.jinja"
SOURCES = {
    "tiny-llama": (DEMO, None),
    "strict": (DEMO, STRICT.read_text("utf-8")),
    "tiny-qwen3": (TokenizerSource(str(QWEN3)), None),
}
"""Tokenizers, and the templates that replace their own."""


def recorded(endpoint: Endpoint, name: str) -> list[dict[str, Any]]:
    text = (GOLDENS / f"vllm_{endpoint.name.lower()}_{name}.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


def as_received(endpoint: Endpoint, body: dict[str, Any]) -> dict[str, Any]:
    """The prompt's fields as the edge leaves them: undecoded."""
    return PARSERS[endpoint].prompt_fields(PARSERS[endpoint].parse(json.dumps({"model": "tiny", **body}).encode()))


@pytest.mark.parametrize("endpoint", [Endpoint.MESSAGES, Endpoint.RESPONSES])
@pytest.mark.parametrize("name", SOURCES)
def test_bodies_have_the_tokens_that_vllm_gave_them(name: str, endpoint: Endpoint) -> None:
    """Hundreds of bodies of every kind, by three templates; one of them refuses late system messages."""
    if name == "tiny-qwen3" and not (QWEN3 / "tokenizer.json").is_file():
        pytest.skip(f"no Qwen3 tokenizer in {QWEN3}: tests/live/install.sh gets it")
    source, text = SOURCES[name]
    tokenizer = loaded_tokenizer(source)
    fingerprinter = Fingerprinter(tokenizer, ChatTemplate(tokenizer, text), Generation(model="tiny"))
    cases = recorded(endpoint, name)
    assert len(cases) >= 100
    for case in cases:
        request = scenes.request(endpoint=endpoint, model="tiny", body=b"", prompt=as_received(endpoint, case["body"]))
        tokens = array("I", fingerprinter.fingerprint(request, ENGINES["vllm"].conversions[endpoint]).tokens)
        assert (len(tokens), xxh3_64_hexdigest(tokens.tobytes())) == (case["tokens"], case["digest"]), case["body"]
