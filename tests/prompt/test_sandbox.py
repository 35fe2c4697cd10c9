"""Our sandbox renders what the one of `transformers` renders."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import MalformedRequest
from router.prompt import template as template_module
from router.prompt.conversation import Unrenderable
from router.prompt.sandbox import MAX_INDENTATION, compile_template, render_template
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer
from tests.prompt.conftest import TEMPLATE
from tests.prompt.incremental.test_reader import CUTTING, LOOKING_BACK
from tests.prompt.incremental.test_skeleton import DOING_MORE, REPEATING

GOLDENS = Path(__file__).parents[1] / "parity" / "goldens"
DEMO = (files("loadtest.mock_engine") / "chat_template.jinja").read_text("utf-8")
CHATS = [
    case["body"] for path in sorted(GOLDENS.glob("vllm_chat_tokens_*.json")) for case in json.loads(path.read_text())
]
FEATURES = {
    "trims blocks": "{% if true %}\n  {% if true %}\n  a\n  {% endif %}\n{% endif %}\n\nb\n",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "continue": "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "generation tag": "{% for m in messages %}{% generation %}<{{ m.role }}>{% endgeneration %}{% endfor %}",
    "scope of the generation tag": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "JSON": "{{ messages | tojson }}{{ {'é': '<&>', 'a': [1]} | tojson(indent=2, sort_keys=true) }}",
    "compact JSON": "{{ messages[0] | tojson(separators=(',', ':'), ensure_ascii=true) }}",
    "date": "{{ strftime_now('%Y-%m-%d') }}",
    "raises": "{{ raise_exception('not like this') }}",
    "missing fields": "{{ messages[0].nothing is defined }}{{ messages[0]['nothing'] }}{{ messages[0].get('role') }}",
    "fields named as methods": "{% for k, v in messages[0].items() %}{{ k }}={{ v }}{% endfor %}{{ messages[0].keys is callable }}",  # noqa: E501
    "absent variables": "{{ tools is none }}{{ documents is none }}{{ nothing is defined }}{{ add_generation_prompt }}",
    "unsafe": "{{ messages.__class__.__mro__ }}",
    "immutable": "{{ messages.append(1) }}",
    "undefined attribute": "{{ nothing.at.all }}",
}
TEMPLATES = {"demo": DEMO, "test": TEMPLATE, "cutting": CUTTING, "looking back": LOOKING_BACK, **FEATURES, **REPEATING}
TEMPLATES |= DOING_MORE


def outcome(render: Any) -> str:
    try:
        return f"text: {render()}"
    except Exception as error:
        continued = isinstance(error, ValueError) and "continue_final_message" in str(error)
        return "ValueError: continue_final_message" if continued else f"{type(error).__name__}: {error}"


def by_transformers(text: str, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    """What its sandbox renders. Imported here: it takes a second, also in processes that run none of these tests."""
    from transformers.utils.chat_template_utils import render_jinja_template

    return str(render_jinja_template([messages], chat_template=text, **variables)[0][0])


def rendered_by_both(
    monkeypatch: pytest.MonkeyPatch, template: ChatTemplate, body: dict[str, Any]
) -> tuple[str, str] | None:
    """What both sandboxes make of one request; None where it does not come to rendering."""
    from transformers.utils import chat_template_utils

    found = []

    def render_both(compiled: Any, text: str, conversation: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        ours = outcome(lambda: render_template(compiled, text, conversation, variables))
        theirs = outcome(lambda: by_transformers(text, conversation, variables))
        found.append((ours, theirs))
        return ""

    monkeypatch.setattr(template_module, "render_template", render_both)
    # transformers 5.23 adds `thinking` to messages that have `reasoning_content`; vLLM 0.32 renders without it.
    monkeypatch.setattr(chat_template_utils, "_alias_reasoning_fields", list, raising=False)
    try:
        template.render(body)
    except (MalformedRequest, Unrenderable):
        return None
    return found[0]


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_recorded_chat_is_rendered_as_by_transformers(
    deepseek: Tokenizer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """By every template of these tests, with and without errors."""
    template = ChatTemplate(deepseek, TEMPLATES[name])
    pairs = [pair for body in CHATS if (pair := rendered_by_both(monkeypatch, template, body))]
    assert len(pairs) > 50
    for ours, theirs in pairs:
        assert ours == theirs


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.sampled_from('ab"\\\\,:[]{}é\n\u2028'), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text('a"\\\\{', max_size=3) | st.integers(), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(
    value=JSON,
    indent=st.sampled_from([0, 1, 2, 4, -1, True, "\t", "[,"]),
    separators=st.sampled_from([None, (",", ":"), (" , ", " = ")]),
    options=st.fixed_dictionaries({"ensure_ascii": st.booleans()}),
)
def test_indented_json_is_that_of_python(value: Any, indent: Any, separators: Any, options: dict[str, Any]) -> None:
    """For every value, with every way to indent it."""
    options = {**options, "indent": indent, "separators": separators}
    rendered = compile_template("{{ value | tojson(**options) }}").render(value=value, options=options)
    assert rendered == json.dumps(value, **options)


def test_tools_nested_deeply_are_left_to_the_engine_where_they_are_printed_with_an_indent(deepseek: Tokenizer) -> None:
    """Their text would have hundreds of times their size. Without an indent, it has as many characters."""
    printing = "{{% for tool in tools %}}{{{{ tool | tojson({}) }}}}{{% endfor %}}"
    indented, compact = (ChatTemplate(deepseek, printing.format(option)) for option in ("indent=4", ""))
    messages = [{"role": "user", "content": "hi"}]
    chain: dict[str, Any] = {}
    for _ in range(900):
        chain = {"a": chain}

    def chat(parameters: Any) -> dict[str, Any]:
        return {
            "messages": messages,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}],
        }

    with pytest.raises(Unrenderable, match="nested too deeply"):
        indented.render(chat(chain))
    assert (
        chat(chain)["tools"][0]["function"]["parameters"]
        == json.loads(compact.render(chat(chain)))["function"]["parameters"]
    )
    wide: Any = [{f"field_{number}": {"type": "string", "enum": ["a", "b"]} for number in range(20)}]
    for _ in range(MAX_INDENTATION):
        wide = {"properties": wide}
    assert json.loads(indented.render(chat(wide)))["function"]["parameters"] == wide


@pytest.mark.parametrize("field", [True, "content", "reasoning"])
@pytest.mark.parametrize(
    "content", ["a word ", "a word", [{"type": "text", "text": "a "}, {"type": "text", "text": "b "}]]
)
@pytest.mark.parametrize(
    "text",
    [
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<end>",
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}<end>",
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}|{% endfor %}{% endfor %}",
        "{% for m in messages %}{{ m.content[:3] }}{% endfor %}",
        "{% for m in messages %}{{ m.role }}{% endfor %}",
    ],
)
def test_a_continued_final_message_ends_as_by_transformers(content: Any, field: Any, text: str) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
    given = {"continue_final_message": field}
    ours = outcome(lambda: render_template(compile_template(text), text, messages, given))
    assert ours == outcome(lambda: by_transformers(text, messages, given))
    assert messages[1]["content"] == content


def test_a_final_message_without_text_cannot_be_continued() -> None:
    text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for content in (None, [], [{"type": "image"}]):
        messages = [{"role": "assistant", "content": content}]
        with pytest.raises(ValueError, match="continue_final_message"):
            render_template(compile_template(text), text, messages, {"continue_final_message": True})


def test_documents_must_be_objects() -> None:
    with pytest.raises(TypeError, match="documents"):
        render_template(compile_template("x"), "x", [], {"documents": ["text"]})
