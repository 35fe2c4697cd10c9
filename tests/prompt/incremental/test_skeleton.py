"""Skeletons of templates that only repeat contents, and of those that do more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import MalformedRequest
from router.prompt.incremental.reader import MAX_MESSAGES, Skeletons
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer


def each(text: str) -> str:
    """`text` for each message, `m`."""
    return "{% for m in messages %}" + text + "{% endfor %}"


REPEATING = {
    "chatml": each("<|im_start|>{{ m.role }}\n{{ m['content'] }}<|im_end|>\n") + "<|im_start|>",
    "strips": each(
        "{% set content = '[' + m.role + ']' + m.content | trim + '\\n' %}"
        "{{ bos_token + content if loop.first else content }}"
    ),
    "system prompt in the first message": (
        "{% if messages[0].role == 'system' %}"
        "{% set first = messages[0].content + '\\n' %}{% set rest = messages[1:] %}"
        "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}<{{ m.role }}>{{ first if loop.first }}{{ m.content | trim }}{% endfor %}"
    ),
    "cuts off thoughts": each(
        "{% set content = m.content %}{% if m.role == 'assistant' and '</think>' in content %}"
        "{% set content = content.split('</think>')[-1] %}{% endif %}<{{ m.role }}>{{ content.lstrip('\\n') }}"
    ),
    "marks the last question": (
        "{% set ns = namespace(last=0, open=true) %}{% for m in messages[::-1] %}{% if ns.open and m.role == 'user' "
        "and not (m.content.startswith('<tool>') and m.content.endswith('</tool>')) %}"
        "{% set ns.open = false %}{% set ns.last = messages | length - 1 - loop.index0 %}{% endif %}{% endfor %}"
    )
    + each("{{ '<last>' if loop.index0 == ns.last }}{{ m.role }}:{{ m.content }};"),
    "tests for empty contents": each("{% if m.content %}{{ m.role ~ ': ' ~ m.content }}{% else %}-{% endif %}"),
    "calls a macro": "{% macro said(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}" + each("{{ said(m) }}"),
    "tests its type": each(
        "{% if m.content is string %}{{ m.content }}{% elif m.content is iterable %}"
        "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}|"
    ),
    "passes it to a function": each(
        "{{ '<' + m.role + '>' }}{% set twice = joiner(m.content) %}{{ twice() }}{{ twice() }}"
    ),
    "begins with an empty line": "\n\n  {% if true %}\n" + each("{{ m.content }};") + "{% endif %}",
    "finds it in a list": each("{{ '-' if m.content in ['stop', 'go'] else m.content }}|"),
    "does not find it in a list": each("{{ m.content if m.content not in ['stop', 'go'] else '-' }}|"),
    "compares": each("{% if m.content == 'stop' %}STOP{% else %}{{ m.content }}{% endif %}|"),
}
DOING_MORE = {
    "counts letters": each("{{ m.content | length }}"),
    "cuts": each("{{ m.content[:3] }}"),
    "splits": each("{{ m.content.split(' ')[0] }}"),
    "upper case": each("{{ m.content | upper }}"),
    "writes JSON": each("{{ m.content | tojson }}"),
    "escapes": each("{{ m.content | e }}"),
    "repeats": each("{{ m.content * 2 }}"),
    "prints it twice": each("{{ m.content }}{{ m.content }}"),
    "reverses messages": "{% for m in messages[::-1] %}{{ m.content }}{% endfor %}",
    "omits a message": "{% for m in messages[1:] %}{{ m.content }}{% endfor %}",
    "tests a joined text": each("{% set x = m.role ~ m.content %}{{ x if 'y' in x else 'no' }}"),
    "tests a sum": each("{% set x = 'a' + m.content %}{{ x if x.endswith('b') else 'no' }}"),
    "tests a macro's text": "{% macro f(m) %}{{ m.content }}{% endmacro %}"
    + each("{{ 'Y' if 'y' in f(m) else f(m) }}"),
    "tests a block": each("{% set x %}{{ m.content }}{% endset %}{{ 'Y' if x == 'y' else x }}"),
    "joins": "{% set all = messages | map(attribute='content') | join(' ') %}{{ 'Y' if 'y' in all else all }}",
    "formats": each("{% set x = '%s!' % m.content %}{{ 'Y' if 'y' in x else x }}"),
    "formats by a tuple": each("{% set x = '%s%s' % (m.content, 1) %}{{ 'Y' if 'y' in x else x }}"),
    "formats by a method": each("{% set x = '{}'.format(m.content) %}{{ 'Y' if 'y' in x else x }}"),
    "formats with a computed format": each(
        "{% set f = 'a' + '%s' %}{% set x = f % (m.content,) %}{{ x if x | length < 99 }}"
    ),
    "joins by a method": each("{% set x = ''.join([m.content]) %}{{ x if x | length < 99 else 'long' }}"),
    "joins all fields": each("{% set x = m.values() | join %}{{ x if x | length < 99 else 'long' }}"),
    "replaces by it": each("{% set x = 'c'.replace('c', m.content) %}{{ x if x | length < 99 else 'long' }}"),
    "uses it as a key": each("{{ {'y': 1}[m.content] or m.content }}"),
    "sorts": "{% for m in messages | sort(attribute='content') %}{{ m.content }}{% endfor %}",
    "iterates over characters": each("{% for c in m.content %}{{ c }}{% endfor %}"),
    "prints the date": "{{ strftime_now('%Y') }}" + each("{{ m.content }}"),
}

USABLE_FOR_SOME_ROLES = {"reverses messages", "tests a block", "uses it as a key"}
"""Depend on contents only for more messages, or for contents with a guard word."""
ROLES = st.lists(st.sampled_from(["system", "user", "assistant"]), min_size=1, max_size=6)
SNIPPETS = (
    *("</think>", "<tool>", "</tool>", "y", "stop", "go", "", " ", "\n", "\t"),
    *("x-anthropic-billing-header: 1\nx", "\uf8ff", '"<é'),
)
CONTENTS = st.lists(st.sampled_from(SNIPPETS), max_size=4).map("".join) | st.text(max_size=12)


@pytest.fixture(scope="module")
def skeletons(deepseek: Tokenizer) -> Mapping[str, tuple[ChatTemplate, Skeletons]]:
    templates = {name: ChatTemplate(deepseek, text) for name, text in (REPEATING | DOING_MORE).items()}
    return {name: (template, Skeletons(template)) for name, template in templates.items()}


@pytest.mark.parametrize("name", REPEATING)
def test_a_template_that_only_repeats_contents_has_a_skeleton(skeletons: Any, name: str) -> None:
    _, found = skeletons[name]
    skeleton = found.find(("system", "user", "assistant", "user"))
    assert found.enabled
    assert skeleton.fill(["be", "what?", "that", "why?"])[1::2] == ["be", "what?", "that", "why?"]


@pytest.mark.parametrize("name", sorted(DOING_MORE.keys() - USABLE_FOR_SOME_ROLES))
def test_a_template_that_depends_on_contents_is_not_used(skeletons: Any, name: str) -> None:
    _, found = skeletons[name]
    assert not found.enabled


@given(name=st.sampled_from([*REPEATING, *DOING_MORE]), roles=ROLES, data=st.data())
def test_a_filled_skeleton_is_the_rendered_prompt(
    skeletons: Any, name: str, roles: list[str], data: st.DataObject
) -> None:
    template, found = skeletons[name]
    contents = data.draw(st.lists(CONTENTS, min_size=len(roles), max_size=len(roles)))
    skeleton = found.find(tuple(roles))
    if not found.enabled or skeleton is None or not found.can_fill(contents):
        return
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    assert "".join(skeleton.fill(contents)) == template.render({"messages": messages})


def test_roles_that_the_template_refuses_have_no_skeleton(deepseek: Tokenizer) -> None:
    text = each("{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ m.content }}")
    template = ChatTemplate(deepseek, text)
    found = Skeletons(template)
    assert found.find(("system", "user")) is None
    assert found.find(("user",)) is not None
    with pytest.raises(MalformedRequest, match="no system"):
        template.render({"messages": [{"role": "system", "content": "x"}]})


def test_contents_with_a_guard_word_and_empty_ones_are_left_to_the_template(skeletons: Any) -> None:
    _, found = skeletons["cuts off thoughts"]
    assert found.can_fill(["a", "b c"])
    for content in ("<think>b</think>c", "", " \n", "x-anthropic-billing-header: 1"):
        assert not found.can_fill(["a", content])


def test_words_of_the_default_variables_are_tried_too(deepseek: Tokenizer) -> None:
    template = ChatTemplate(
        deepseek, each("{{ names[m.content] or '-' }}{{ m.content }}"), default_kwargs={"names": {"hello": "HI"}}
    )
    found = Skeletons(template)
    assert found.enabled
    assert not found.can_fill(["hello"])


@pytest.mark.parametrize(
    ("strip", "printed"),
    [
        ("m.content", "\n a \n"),
        ("m.content.strip()", "a"),
        ("m.content.lstrip()", "a \n"),
        ("m.content.rstrip()", "\n a"),
        ("m.content.strip('\\n')", " a "),
        ("m.content.lstrip('\\n')", " a \n"),
        ("m.content.rstrip('\\n')", "\n a "),
    ],
)
def test_contents_are_stripped_as_the_template_strips_them(deepseek: Tokenizer, strip: str, printed: str) -> None:
    skeleton = Skeletons(ChatTemplate(deepseek, each("\n<{{ " + strip + " }}> "))).find(("user", "assistant"))
    assert skeleton is not None
    assert skeleton.fill(["\n a \n", "b"]) == [skeleton.literals[0], printed, skeleton.literals[1], "b", "> "]


def test_a_strip_of_other_characters_has_no_skeleton(deepseek: Tokenizer) -> None:
    found = Skeletons(ChatTemplate(deepseek, each("<{{ m.content.strip(' ') }}>")))
    assert found.find(("user",)) is None
    assert not found.enabled


def test_skeletons_that_begin_alike_share_a_prefix_digest(skeletons: Any) -> None:
    short, long = ("system", "user"), ("system", "user", "assistant", "user")
    plain = [skeletons["chatml"][1].find(roles).prefixes for roles in (short, long)]
    assert plain[0][:2] == plain[1][:2]
    assert plain[0][2] != plain[1][2]
    marking = [skeletons["marks the last question"][1].find(roles).prefixes for roles in (short, long)]
    assert marking[0][0] == marking[1][0]
    assert marking[0][1] != marking[1][1]


def test_a_skeleton_is_filled_from_any_content_on(skeletons: Any) -> None:
    skeleton = skeletons["chatml"][1].find(("user", "assistant", "user"))
    assert skeleton.fill(["b", "c"], first=1) == skeleton.fill(["a", "b", "c"])[3:]


def test_equal_literals_are_stored_once(skeletons: Any) -> None:
    literals = skeletons["cuts off thoughts"][1].find(("user", "assistant") * 9).literals[1:-1]
    assert len(set(map(id, literals))) == len(set(literals)) == 2


def test_very_long_chats_have_no_skeleton(skeletons: Any) -> None:
    found = skeletons["chatml"][1]
    assert found.find(("user",) * (MAX_MESSAGES + 1)) is None
    assert found.find(("user",) * MAX_MESSAGES) is not None
