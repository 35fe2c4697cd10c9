"""Templates that only repeat contents, and those that do more."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.errors import MalformedRequest
from router.prompt.shapes import MAX_MESSAGES
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer


def each(text: str) -> str:
    """Say it for each message, `m`."""
    return "{% for m in messages %}" + text + "{% endfor %}"


REPEATING = {
    "chatml": each("<|im_start|>{{ m.role }}\n{{ m['content'] }}<|im_end|>\n") + "<|im_start|>",
    "trims": each(
        "{% set content = '[' + m.role + ']' + m.content | trim + '\\n' %}"
        "{{ bos_token + content if loop.first else content }}"
    ),
    "system goes into the first message": (
        "{% if messages[0].role == 'system' %}"
        "{% set first = messages[0].content + '\\n' %}{% set rest = messages[1:] %}"
        "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}<{{ m.role }}>{{ first if loop.first }}{{ m.content | trim }}{% endfor %}"
    ),
    "asks for thoughts": each(
        "{% set content = m.content %}{% if m.role == 'assistant' and '</think>' in content %}"
        "{% set content = content.split('</think>')[-1] %}{% endif %}<{{ m.role }}>{{ content.lstrip('\\n') }}"
    ),
    "looks back for the last question": (
        "{% set ns = namespace(last=0, open=true) %}{% for m in messages[::-1] %}{% if ns.open and m.role == 'user' "
        "and not (m.content.startswith('<tool>') and m.content.endswith('</tool>')) %}"
        "{% set ns.open = false %}{% set ns.last = messages | length - 1 - loop.index0 %}{% endif %}{% endfor %}"
    )
    + each("{{ '<last>' if loop.index0 == ns.last }}{{ m.role }}:{{ m.content }};"),
    "empty contents": each("{% if m.content %}{{ m.role ~ ': ' ~ m.content }}{% else %}-{% endif %}"),
    "says it by a macro": "{% macro said(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}" + each("{{ said(m) }}"),
    "asks what it is": each(
        "{% if m.content is string %}{{ m.content }}{% elif m.content is iterable %}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}|"
    ),
    "calls a function with it": each(
        "{{ '<' + m.role + '>' }}{% set twice = joiner(m.content) %}{{ twice() }}{{ twice() }}"
    ),
    "begins with an empty line": "\n\n  {% if true %}\n" + each("{{ m.content }};") + "{% endif %}",
    "finds it in a list": each("{{ '-' if m.content in ['stop', 'go'] else m.content }}|"),
    "misses it in a list": each("{{ m.content if m.content not in ['stop', 'go'] else '-' }}|"),
    "compares": each("{% if m.content == 'stop' %}STOP{% else %}{{ m.content }}{% endif %}|"),
}
DOING_MORE = {
    "counts letters": each("{{ m.content | length }}"),
    "cuts": each("{{ m.content[:3] }}"),
    "splits": each("{{ m.content.split(' ')[0] }}"),
    "shouts": each("{{ m.content | upper }}"),
    "writes JSON": each("{{ m.content | tojson }}"),
    "escapes": each("{{ m.content | e }}"),
    "repeats": each("{{ m.content * 2 }}"),
    "says it twice": each("{{ m.content }}{{ m.content }}"),
    "turns around": "{% for m in messages[::-1] %}{{ m.content }}{% endfor %}",
    "leaves out": "{% for m in messages[1:] %}{{ m.content }}{% endfor %}",
    "asks a joined text": each("{% set x = m.role ~ m.content %}{{ x if 'y' in x else 'no' }}"),
    "asks a sum": each("{% set x = 'a' + m.content %}{{ x if x.endswith('b') else 'no' }}"),
    "asks a macro's text": "{% macro f(m) %}{{ m.content }}{% endmacro %}" + each("{{ 'Y' if 'y' in f(m) else f(m) }}"),
    "asks a block": each("{% set x %}{{ m.content }}{% endset %}{{ 'Y' if x == 'y' else x }}"),
    "joins": "{% set all = messages | map(attribute='content') | join(' ') %}{{ 'Y' if 'y' in all else all }}",
    "formats": each("{% set x = '%s!' % m.content %}{{ 'Y' if 'y' in x else x }}"),
    "formats by a tuple": each("{% set x = '%s%s' % (m.content, 1) %}{{ 'Y' if 'y' in x else x }}"),
    "formats by a method": each("{% set x = '{}'.format(m.content) %}{{ 'Y' if 'y' in x else x }}"),
    "formats by a text that it made": each(
        "{% set f = 'a' + '%s' %}{% set x = f % (m.content,) %}{{ x if x | length < 99 }}"
    ),
    "looks for it in a text": each("{{ 'Y' if m.content and m.content in m.role else m.content }}"),
    "tests for it in a text": each("{{ 'Y' if m.content and m.content is in(m.role) else m.content }}"),
    "looks for it in a chain": each("{{ 'Y' if '' < m.content in m.role else m.content }}"),
    "is it the same": each("{{ 'Y' if m.content is sameas m.role else m.content }}"),
    "begins with it": each("{{ 'Y' if m.content and m.role.startswith(m.content) else m.content }}"),
    "joins by a method": each("{% set x = ''.join([m.content]) %}{{ x if x | length < 99 else 'long' }}"),
    "splits by it": each("{{ m.role.split(sep=m.content or 'x') | length }}{{ m.content }}"),
    "joins its fields": each("{% set x = m.values() | join %}{{ x if x | length < 99 else 'long' }}"),
    "puts it in": each("{% set x = 'c'.replace('c', m.content) %}{{ x if x | length < 99 else 'long' }}"),
    "looks it up": each("{{ {'y': 1}[m.content] or m.content }}"),
    "orders": "{% for m in messages | sort(attribute='content') %}{{ m.content }}{% endfor %}",
    "walks": each("{% for c in m.content %}{{ c }}{% endfor %}"),
    "tells the date": "{{ strftime_now('%Y') }}" + each("{{ m.content }}"),
}
ROLES = st.lists(st.sampled_from(["system", "user", "assistant"]), min_size=1, max_size=6)
SNIPPETS = (
    "</think>",
    "<tool>",
    "</tool>",
    "y",
    "stop",
    "",
    " ",
    "\n",
    "x-anthropic-billing-header: 1\nx",
    "\uf8ff",
    '"<é',
)
CONTENTS = st.lists(st.sampled_from(SNIPPETS), max_size=4).map("".join) | st.text(max_size=12)


def chat(roles: list[str], contents: list[str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]


@pytest.fixture(scope="module")
def templates(deepseek: Tokenizer) -> dict[str, ChatTemplate]:
    return {name: ChatTemplate(deepseek, text) for name, text in (REPEATING | DOING_MORE).items()}


@pytest.fixture(scope="module")
def asked(deepseek: Tokenizer) -> dict[str, ChatTemplate]:
    """The same, but of a kind that is always rendered: it names the time, though it never says it."""
    unsteady = "{% if false %}{{ strftime_now('%Y') }}{% endif %}\n"
    return {name: ChatTemplate(deepseek, unsteady + text) for name, text in (REPEATING | DOING_MORE).items()}


@pytest.mark.parametrize("name", REPEATING)
def test_what_only_repeats_contents_has_a_form(templates: dict[str, ChatTemplate], name: str) -> None:
    """For each sequence of roles, however the template gets at the contents."""
    shape = templates[name].shape(("system", "user", "assistant", "user"))
    assert shape is not None
    parts = shape.fill(["be", "what?", "that", "why?"])
    assert parts is not None
    assert parts[1::2] == ["be", "what?", "that", "why?"]


@pytest.mark.parametrize("name", DOING_MORE)
def test_what_depends_on_contents_has_none(templates: dict[str, ChatTemplate], name: str) -> None:
    """Where a content is asked in a way that is not understood, also by a detour, or is not repeated once in order."""
    assert templates[name].shape(("user", "assistant", "user")) is None


@given(name=st.sampled_from([*REPEATING, *DOING_MORE]), roles=ROLES, data=st.data())
@settings(max_examples=400, deadline=None)
def test_a_filled_form_is_what_the_template_renders(
    templates: dict[str, ChatTemplate], asked: dict[str, ChatTemplate], name: str, roles: list[str], data: st.DataObject
) -> None:
    """Whatever was said, also where the template would treat it in its own way."""
    body = {"messages": chat(roles, data.draw(st.lists(CONTENTS, min_size=len(roles), max_size=len(roles))))}
    try:
        rendered = asked[name].render(body)
    except MalformedRequest:
        with pytest.raises(MalformedRequest):
            templates[name].render(body)
        return
    assert templates[name].render(body) == rendered


def test_an_unusual_content_is_left_to_the_template(templates: dict[str, ChatTemplate]) -> None:
    """A form answers no to whatever was asked of its contents."""
    shape = templates["asks for thoughts"].shape(("user", "assistant", "user"))
    assert shape is not None
    assert shape.fill(["a", "<think>b</think>c", "d"]) is None
    assert shape.fill(["a </think>", "c", "d"]) is not None


def test_forms_that_begin_alike_are_known_by_it(templates: dict[str, ChatTemplate]) -> None:
    """Up to where the template says, or asks, something else."""
    short, long = (("system", "user"), ("system", "user", "assistant", "user"))
    plain, asking = templates["chatml"], templates["looks back for the last question"]
    of_plain = [shape.prefixes for roles in (short, long) if (shape := plain.shape(roles))]
    assert of_plain[0][:2] == of_plain[1][:2]
    assert of_plain[0][2] != of_plain[1][2]
    of_asking = [shape.prefixes for roles in (short, long) if (shape := asking.shape(roles))]
    assert of_asking[0][0] == of_asking[1][0]
    assert of_asking[0][1] != of_asking[1][1]


def test_a_form_is_filled_from_any_content_on(templates: dict[str, ChatTemplate]) -> None:
    """What stands before it is known already."""
    shape = templates["chatml"].shape(("user", "assistant", "user"))
    assert shape is not None
    whole, behind = shape.fill(["a", "b", "c"]), shape.fill(["b", "c"], first=1)
    assert whole is not None
    assert behind == whole[3:]


def test_what_forms_repeat_is_kept_once(templates: dict[str, ChatTemplate]) -> None:
    """A long one is little more than references."""
    shape = templates["asks for thoughts"].shape(("user", "assistant") * 9)
    assert shape is not None
    for parts in (shape.literals[1:-1], shape.edits, shape.questions):
        assert len(set(map(id, parts))) == len(set(parts)) <= 2


def test_conversations_without_end_have_no_form(templates: dict[str, ChatTemplate]) -> None:
    """Nobody fills the memory with them."""
    assert templates["chatml"].shape(("user",) * (MAX_MESSAGES + 1)) is None
    assert templates["chatml"].shape(("user",) * MAX_MESSAGES) is not None


@pytest.mark.parametrize(
    "text",
    [
        each("{{ (names or {})[m.content] or '-' }}{{ m.content }}"),
        each("{{ (names or '') | trim(m.content) }}{{ m.content }}"),
    ],
)
def test_a_content_by_which_something_of_the_engines_own_is_found_is_never_a_blank(
    deepseek: Tokenizer, text: str
) -> None:
    for names in ({"hello": "GREETING"}, "hello there"):
        template = ChatTemplate(deepseek, text, default_kwargs={"names": names})
        assert template.shape(("user",)) is None
