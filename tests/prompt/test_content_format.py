"""Which templates expect a message's content as a list of parts."""

from __future__ import annotations

import pytest
from jinja2 import Environment

from router.prompt.template import detect_content_format

LOOP = "{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endfor %}"

OPENAI = {
    "attribute": LOOP,
    "item": "{% for m in messages %}{% for part in m['content'] %}{% endfor %}{% endfor %}",
    "filtered": "{% for m in messages | list %}{% for part in m.content | list %}{% endfor %}{% endfor %}",
    "sliced": "{% for m in messages[1:] %}{% for part in m.content[1:] %}{% endfor %}{% endfor %}",
    "renamed twice": "{% set a = messages %}{% set b = a[1:] %}" + LOOP.replace("messages", "b"),
    "through a variable": "{% for m in messages %}{% set content = m.content %}"
    "{% for part in content %}{% endfor %}{% endfor %}",
    "through a macro": "{% macro r(c) %}{% for part in c %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ r(m.content) }}{% endfor %}",
    "through a macro's named argument": "{% macro r(a, c) %}{% for part in c %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ r(1, c=m['content']) }}{% endfor %}",
    "only if it is no string": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% endfor %}{% endif %}{% endfor %}",
}

STRING = {
    "printed": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "other loops": "{% for m in messages %}{% for call in m.tool_calls %}{% endfor %}{% endfor %}",
    "another macro's content": "{% macro r(content) %}{% for part in content %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ r(m.thoughts) }}{% endfor %}",
    "another list's content": "{% for d in documents %}{% for part in d.content %}{% endfor %}{% endfor %}",
    "a variable of another name": "{% for m in messages %}{% set c = m.content %}"
    "{% for part in c %}{% endfor %}{% endfor %}",
    "unpacked": "{% for a, b in messages %}{% endfor %}" + LOOP,
    "assigned to itself": "{% set messages = messages %}{% for m in messages %}{{ m }}{% endfor %}",
    "assigned in a circle": "{% set a = messages %}{% set messages = a %}{{ a }}",
    "empty": "",
}


@pytest.mark.parametrize("name", [*OPENAI, *STRING])
def test_a_template_that_loops_over_content_expects_parts(name: str) -> None:
    """The results are those of vLLM 0.32 for the same templates."""
    text = OPENAI.get(name, STRING.get(name, ""))
    assert detect_content_format(Environment().parse(text)) == ("openai" if name in OPENAI else "string")
