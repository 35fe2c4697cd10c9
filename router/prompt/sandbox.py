"""Renders chat templates in a Jinja sandbox that behaves as the one of `transformers`, which engines use.

`transformers` 5 keeps its environment private, and importing it takes seconds; tests compare both on many templates.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_DICT_METHODS = frozenset(dir(dict))
MAX_ATTRIBUTES = 4096
"""Attributes whose safety is known: a filter may look up names from a request."""
MAX_INDENTATION = 32
"""An indented value may have this many times the characters of the compact one: deeper ones would have millions."""
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\[\]|\{\}|[][{},:]')
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of the final message while it is rendered; the same text as in `transformers`."""


_LATE_SYSTEM = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's tokens for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - declared as an instance variable by Jinja

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _ChatEnvironment(ImmutableSandboxedEnvironment):
    """Looks fields of plain dicts up directly: the sandbox first checks for a method, half of the rendering time. What
    the sandbox says of an attribute depends on the type alone, and is asked once: half of the rest."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._safe: dict[tuple[type, str], bool] = {}

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        safe = self._safe.get((type(obj), attr))
        if safe is None:
            if len(self._safe) >= MAX_ATTRIBUTES:
                self._safe.clear()
            safe = self._safe[type(obj), attr] = super().is_safe_attribute(obj, attr, value)
        return safe

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is not dict or attribute in _DICT_METHODS:
            return super().getattr(obj, attribute)
        return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)


def raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML. Python's indenting encoder takes time for each level around each value."""
    if indent is None:
        return json.dumps(value, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)
    compact = json.dumps(value, ensure_ascii=ensure_ascii, separators=(",", ":"), sort_keys=sort_keys)
    comma, colon = separators or (",", ": ")
    return indented(compact, indent if isinstance(indent, str) else " " * indent, comma, colon)


def indented(compact: str, indent: str, comma: str, colon: str) -> str:
    """Compact JSON as Python's encoder indents it. Raises `RecursionError` above `MAX_INDENTATION`."""
    lines, left = ["\n"], MAX_INDENTATION * len(compact)

    def token(found: re.Match[str]) -> str:
        nonlocal left
        text = found[0]
        if text == ":":
            return colon
        if text in "{[":
            lines.append(lines[-1] + indent)
        elif text in "]}":
            lines.pop()
        elif text != ",":
            return text
        left -= len(lines[-1])
        if left < 0:
            raise RecursionError("nested too deeply to be indented")
        if text in "]}":
            return lines[-1] + text
        return (comma if text == "," else text) + lines[-1]

    return _JSON_TOKEN.sub(token, compact)


def strftime_now(date_format: str) -> str:
    return datetime.now().strftime(date_format)


_ENVIRONMENT = _ChatEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols])
_ENVIRONMENT.filters["tojson"] = _tojson
_ENVIRONMENT.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}


def parse_template(text: str) -> nodes.Template:
    return _ENVIRONMENT.parse(text)


def compile_template(text: str) -> Template:
    """Raises what Jinja raises for a broken template."""
    template = _ENVIRONMENT.from_string(text)
    template.globals = dict(template.globals)  # copied for each rendering; the default ChainMap takes 7 us to copy
    return template


def renders_late_system(text: str) -> bool:
    """Whether a template renders a late system message in an environment without the names that templates may expect,
    as engines try it out."""
    bare = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    try:
        bare.from_string(text).render(messages=_LATE_SYSTEM, add_generation_prompt=False)
    except Exception:  # a template is code
        return False
    return True


def render_template(
    template: Template, text: str, conversation: list[dict[str, Any]], variables: Mapping[str, Any]
) -> str:
    """The prompt of one conversation. `text` is the template's source. Raises what the template raises, and
    `ValueError` or `TypeError` where `transformers` refuses the variables."""
    given = {"tools": None, "documents": None, "add_generation_prompt": False, **variables}
    continues = given.pop("continue_final_message", False)
    if not all(isinstance(document, dict) for document in given["documents"] or ()):
        raise TypeError("documents must be a list of objects")
    if not continues:
        return template.render(messages=conversation, **given)
    field = continues if isinstance(continues, str) else "content"
    conversation = deepcopy(conversation)
    final_text = tag_final_message(conversation[-1], field, text)
    return cut_at_tag(template.render(messages=conversation, **given), final_text)


def tag_final_message(message: dict[str, Any], field: str, text: str) -> str:
    """Append the tag to the message's last text; returns that text without it."""
    content = message.get(field)
    if content is None or field not in text:
        raise ValueError(f"continue_final_message: the final message or the template has no {field!r}")
    if not isinstance(content, list | tuple):
        message[field] = content + _CONTINUE_TAG
        return str(content)
    part = next((part for part in reversed(content) if "text" in part), None)
    if part is None:
        raise ValueError("continue_final_message: the final message has no text")
    final_text = part["text"]
    part["text"] += _CONTINUE_TAG
    return str(final_text)


def cut_at_tag(rendered: str, final_text: str) -> str:
    """The text before the tag. A template that trims the message also trims the tag's last space: then what precedes
    is trimmed too."""
    if final_text.strip() not in rendered or _CONTINUE_TAG.strip() not in rendered:
        raise ValueError("continue_final_message: the template leaves out or changes the final message")
    at = rendered.rindex(_CONTINUE_TAG.strip())
    before = rendered[:at]
    return before if rendered.startswith(_CONTINUE_TAG, at) else before.rstrip()
