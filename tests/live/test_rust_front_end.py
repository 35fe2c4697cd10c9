"""The router reads odd chats as both front ends of vLLM 0.33 do: the renderers of its wheel are asked."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from unicodedata import category

import httpx
import msgspec
import pytest

from loadtest.commands.child_processes import free_port
from router.config.tokenizer_files import TokenizerSource, load_tokenizer
from router.errors import MalformedRequest
from router.prompt.apis.conversion import Conversion
from router.prompt.apis.vllm_rust_chat import VllmRustChat
from router.prompt.conversation import Unrenderable
from router.prompt.fingerprint import Fingerprinter
from router.prompt.harmony import Harmony
from router.prompt.template import ChatTemplate
from router.request.parse import PARSERS
from router.types import Endpoint, Generation
from tests.kit import scenes
from tests.live.engines import HOME, RUST_DATE, EngineProcess, start_renderer, start_rust_renderer
from tests.live.harmony_goldens import FLAGS, MODEL
from tests.live.rust_bodies import SEED, random_chats

pytestmark = [pytest.mark.live, pytest.mark.net]

TRIED = 1000
FRONT_ENDS: dict[str, type[Conversion] | None] = {"rust": VllmRustChat, "python": None}
MODELS = ("qwen3", "qwen2_5", "llama3_1", "llama3_2", "gemma3", "deepseek", "deepseek_v3")
"""Tokenizers with their own templates. That of the package of DeepSeek's has none, and gets that of tiny-llama."""
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
        "{% if tools is defined and tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ add_generation_prompt }}"
    ),
    "dump": (
        "{{ messages }}{{ messages | tojson }}{{ tools is defined }}{{ tools }}{{ x }}{{ documents }}"
        "{{ enable_thinking }}"
    ),
}
"""Templates that the reference of the project has not tried."""


@pytest.fixture(scope="module")
def bodies() -> list[bytes]:
    """The same for all models."""
    return [msgspec.json.encode({"model": "tiny", **body}) for body in random_chats(TRIED)]


def _folder(name: str, tmp_path: Path) -> Path:
    """A folder with the files that renderers read."""
    if name == "gpt-oss":
        return MODEL
    if name in ("deepseek", *TEMPLATES):
        return HOME / "model" / ("tiny-llama" if name == "deepseek" else "tiny-qwen3")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).symlink_to(HOME / "tokenizer" / name / file)
    config = json.loads((HOME / "model" / "tiny-llama" / "config.json").read_text())
    if name == "deepseek_v3":  # without its type, transformers makes another tokenizer of its files
        sizes = {"vocab_size": 129280, "max_position_embeddings": 32768}
        config = {"model_type": name, "architectures": ["DeepseekV3ForCausalLM"], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def _renderer(front_end: str, name: str, model: Path, template: Path | None) -> EngineProcess:
    flags = [] if template is None else ["--chat-template", str(template)]
    if front_end == "rust":
        parser = [] if name == "gpt-oss" else ["--tool-call-parser", "hermes"]
        return start_rust_renderer(name, free_port(), model, [*parser, *flags])
    parser = [*FLAGS[:2], "openai" if name == "gpt-oss" else "hermes"]
    date = {"VLLM_SYSTEM_START_DATE": RUST_DATE}
    return start_renderer(f"render-{name}", free_port(), model, [*parser, *flags], date, installed="vllm33")


@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.parametrize("name", [*MODELS, "gpt-oss", *TEMPLATES])
def test_odd_chats_have_the_tokens_of_each_front_end(
    name: str, front_end: str, bodies: list[bytes], tmp_path: Path
) -> None:
    model, template_file = _folder(name, tmp_path), None
    if name in TEMPLATES:
        template_file = tmp_path / "template.jinja"
        template_file.write_text(TEMPLATES[name])
    tokenizer = load_tokenizer(TokenizerSource(str(model)), fast=True)
    template: ChatTemplate | Harmony = (
        Harmony([token.content for token in tokenizer.added_tokens], lambda: RUST_DATE)
        if name == "gpt-oss"
        else ChatTemplate(tokenizer, TEMPLATES.get(name))
    )
    fingerprinter = Fingerprinter(tokenizer, template, Generation(model="tiny"))
    results: Counter[str] = Counter()
    wrong: list[bytes] = []
    with (
        _renderer(front_end, name, model, template_file) as renderer,
        httpx.Client(base_url=renderer.url, timeout=60) as client,
    ):
        for raw in bodies:
            answer = client.post(f"{Endpoint.CHAT}/render", content=raw, headers={"content-type": "application/json"})
            engine = answer.json()["token_ids"] if answer.status_code == 200 else None
            ours = read(fingerprinter, raw, FRONT_ENDS[front_end])
            what = "refused" if engine is None else "unread" if ours is None else "equal" if ours == engine else "wrong"
            results[what] += 1
            wrong += [raw] if what == "wrong" else []
    print(name, front_end, SEED, dict(results))
    assert not wrong, wrong[0]
    # Gemma's template refuses most. Of lists that are printed with characters that Unicode has not assigned, of which
    # these bodies are full, the router reads nothing.
    accepted = TRIED - results["refused"]
    assert accepted > TRIED / 20 and results["unread"] < accepted * (0.5 if name == "dump" else 0.05)


PRINTED = (
    "{% for c in x %}{{ [c] }}{{ (c ~ 'aB ' ~ c) | title }}{{ (c ~ 'Bc') | capitalize }}{{ c | upper | lower }}"
    "{{ c | trim }}{{ ('a' ~ c ~ 'b').split() | length }}{{ c | e }}{{ c | tojson }}\n{% endfor %}"
)
NEWER = frozenset("\u019b\u0264\ua7d3\ua7d5\U0001171e")
"""Characters that have changed since the Unicode of Python 3.11."""


def test_every_character_is_printed_as_minijinja_prints_it(tmp_path: Path) -> None:
    model, template = HOME / "model" / "tiny-llama", tmp_path / "template.jinja"
    template.write_text(PRINTED)
    tokenizer = load_tokenizer(TokenizerSource(str(model)), fast=True)
    fingerprinter = Fingerprinter(tokenizer, ChatTemplate(tokenizer, PRINTED), Generation(model="tiny"))
    characters = [one for one in map(chr, range(0x20, 0x20000)) if category(one) not in ("Cn", "Co", "Cs")]
    wrong: set[str] = set()
    with (
        _renderer("rust", "characters", model, template) as renderer,
        httpx.Client(base_url=renderer.url, timeout=60) as client,
    ):
        for start in range(0, len(characters), 1000):
            asked = characters[start : start + 1000]
            messages = [{"role": "user", "content": "x"}]
            raw = msgspec.json.encode({"model": "tiny", "messages": messages, "chat_template_kwargs": {"x": asked}})
            answer = client.post(f"{Endpoint.CHAT}/render", content=raw, headers={"content-type": "application/json"})
            both = answer.json()["token_ids"], read(fingerprinter, raw, VllmRustChat) or []
            lines = [tokenizer.text_of(tokens, special=True).split("\n") for tokens in both]
            wrong.update(one for one, engine, ours in zip(asked, *lines, strict=False) if engine != ours)
    assert wrong <= NEWER


def read(fingerprinter: Fingerprinter, raw: bytes, conversion: type[Conversion] | None) -> list[int] | None:
    parser = PARSERS[Endpoint.CHAT]
    try:
        prompt = parser.prompt_fields(parser.parse(raw))
        request = scenes.request(model="tiny", body=raw, prompt=prompt)
        return list(fingerprinter.fingerprint(request, conversion).tokens)
    except (Unrenderable, MalformedRequest):
        return None
