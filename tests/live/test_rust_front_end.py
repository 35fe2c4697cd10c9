"""The router reads odd chats as the Rust front end of vLLM does. Its own renderer, `vllm-rs`, is asked."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from router.config.tokenizer_files import TokenizerSource, load_tokenizer
from router.errors import MalformedRequest
from router.prompt.apis.vllm_rust_chat import VllmRustChat
from router.prompt.conversation import Unrenderable
from router.prompt.fingerprint import Fingerprinter
from router.prompt.harmony import Harmony
from router.prompt.template import ChatTemplate
from router.request.parse import PARSERS
from router.types import Endpoint, Generation
from tests.kit import scenes
from tests.live.engines import HOME, RUST_DATE, start_rust_renderer
from tests.live.harmony_goldens import MODEL
from tests.live.rust_bodies import CHATS

pytestmark = [pytest.mark.live, pytest.mark.net]

TRIED = 1000
PORT = 18180
TEMPLATES = {
    "mistral": (
        "{{ bos_token }}{% set ns = namespace(n=0) %}{% for m in messages %}"
        "{% if m.role == 'user' %}{% if loop.last and tools %}[TOOLS]{{ tools }}[/TOOLS]{% endif %}"
        "[INST]{{ m.content }}[/INST]"
        "{% elif m.tool_calls is defined %}[CALLS]{% for c in m.tool_calls %}{{ c }}{{ c.function | tojson }}"
        "{{ c['function'].arguments | string }}{% endfor %}{% set ns.n = ns.n + 1 %}"
        "{% else %}{{ m.role | title }}:{{ m.content.strip() ~ ns.n }}{% endif %}{% endfor %}"
    ),
    "parts": (
        "{% macro shown(content) %}{% if content is string %}<{{ content | trim }}>{% else %}"
        "{% for part in content %}({{ part.type }}{{ part.text }}){% endfor %}{% endif %}{% endmacro %}"
        "{% for m in messages %}{{ m.role }}{{ shown(m['content']) }}"
        "{% if m.reasoning_content %}~{{ m.reasoning }}{% endif %}{% for c in m.tool_calls or [] %}"
        "{% if c.function.arguments is mapping %}{% for k, v in c.function.arguments.items() %}"
        "{{ k }}={{ v if v is string else v | tojson }};{% endfor %}{% endif %}{% endfor %}{% endfor %}"
        "{% if tools is not none %}{{ tools | tojson(indent=2) }}{% endif %}{{ add_generation_prompt }}"
    ),
    "dump": (
        "{{ messages }}{{ messages | tojson }}{{ tools is defined }}{{ tools }}{{ x }}{{ documents }}"
        "{{ enable_thinking }}"
    ),
}
"""Templates that the reference of the project has not tried."""


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama", "gpt-oss", *TEMPLATES])
def test_odd_chats_have_the_tokens_of_the_front_end_in_rust(name: str, tmp_path: Path) -> None:
    model = MODEL if name == "gpt-oss" else HOME / "model" / ("tiny-qwen3" if name in TEMPLATES else name)
    flags = [] if name == "gpt-oss" else ["--tool-call-parser", "hermes"]
    if name in TEMPLATES:
        (tmp_path / "template.jinja").write_text(TEMPLATES[name])
        flags += ["--chat-template", str(tmp_path / "template.jinja")]
    tokenizer = load_tokenizer(TokenizerSource(str(model)), fast=True)
    template: ChatTemplate | Harmony = (
        Harmony([token.content for token in tokenizer.added_tokens], lambda: RUST_DATE)
        if name == "gpt-oss"
        else ChatTemplate(tokenizer, TEMPLATES.get(name))
    )
    fingerprinter = Fingerprinter(tokenizer, template, Generation(model="tiny"))
    results: Counter[str] = Counter()
    wrong: list[Any] = []

    @seed(58)
    @settings(
        max_examples=TRIED,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(CHATS)
    def compare(body: dict[str, Any]) -> None:
        raw = msgspec.json.encode({"model": "tiny", **body})
        answer = client.post(f"{Endpoint.CHAT}/render", content=raw, headers={"content-type": "application/json"})
        engine = answer.json()["token_ids"] if answer.status_code == 200 else None
        ours = read(fingerprinter, raw)
        what = "refused" if engine is None else "unread" if ours is None else "equal" if ours == engine else "wrong"
        results[what] += 1
        if what == "wrong":
            wrong.append(body)

    with (
        start_rust_renderer(name, PORT, model, flags) as renderer,
        httpx.Client(base_url=renderer.url, timeout=60) as client,
    ):
        compare()
    print(name, dict(results))
    assert not wrong, wrong[0]
    # Of lists that are printed with characters that Unicode has not assigned, the router reads nothing.
    assert results["equal"] > TRIED / 4 and results["unread"] < TRIED / 4


def read(fingerprinter: Fingerprinter, raw: bytes) -> list[int] | None:
    parser = PARSERS[Endpoint.CHAT]
    try:
        prompt = parser.prompt_fields(parser.parse(raw))
        request = scenes.request(model="tiny", body=raw, prompt=prompt)
        return list(fingerprinter.fingerprint(request, VllmRustChat).tokens)
    except (Unrenderable, MalformedRequest):
        return None
