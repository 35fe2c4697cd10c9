"""Renders chat templates as minijinja does, in which the Rust front end of vLLM 0.33 renders them.

Jinja2 renders. What both accept and print differently is replaced here (docs/engines.md#the-front-end-in-rust): how
values are printed, and some filters, tests and methods. What minijinja refuses is not: such a request fails at the pod.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from functools import partial
from string import punctuation
from typing import Any
from unicodedata import category

from jinja2 import Template, TemplateError, Undefined, nodes, pass_environment
from jinja2.ext import loopcontrols
from jinja2.filters import do_indent
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from router.prompt.sandbox import GenerationTag, indented, raise_exception, strftime_now

_SPACE = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
_SPACE += "\u2028\u2029\u202f\u205f\u3000"
"""What Rust strips: Python also strips 0x1c to 0x1f."""
_SPACES = re.compile(f"[{_SPACE}]+")
_WORD = re.compile(f"[^{_SPACE}{re.escape(punctuation)}]+")
_LAST_END = re.compile(r"\r?\n\Z")
_PADDED = re.compile(r'"(?:[^"\\]|\\.)*"|-?[0-9.]+e-0[5-9]')
"""Strings, and the floats that Python writes with a padded exponent."""
_ODD_DATE = re.compile(r"%[^aAbBdeHIjmMpSyY%]")
"""Directives of dates that may mean something else in Rust."""
_QUOTED = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\0": "\\0"}
_EXTENDING = frozenset(
    "\u09be\u09d7\u0b3e\u0b57\u0bbe\u0bd7\u0cc0\u0cc2\u0cc7\u0cc8\u0cca\u0ccb\u0cd5\u0cd6\u0d3e\u0d57\u0dcf\u0ddf"
    "\u1715\u1734\u1b35\u1b3b\u1b3d\u1b43\u1b44\u1baa\u1bf2\u1bf3\u302e\u302f\ua953\ua9c0\uff9e\uff9f\U000111c0"
    "\U00011235\U0001133e\U0001134d\U00011357\U000114b0\U000114bd\U000115af\U000116b6\U00011930\U0001193d"
    "\U00016ff0\U00016ff1\U0001d165\U0001d166\U0001d16d\U0001d16e\U0001d16f\U0001d170\U0001d171\U0001d172"
)
"""What Rust escapes inside values besides marks without width (Mn, Me): `Grapheme_Extend` of Unicode."""
_HTML = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;", "/": "&#x2f;"})


def shown(value: Any) -> str:
    """What `{{ value }}` prints."""
    if isinstance(value, str):
        return value
    if isinstance(value, Undefined):
        return ""
    return _decimal(value) if isinstance(value, float) else _inside(value)


def _inside(value: Any) -> str:
    """What is printed of a value inside a list or dict."""
    if isinstance(value, str):
        return f'"{value.translate(_ASCII) if value.isascii() else "".join(map(_quoted, value))}"'
    if isinstance(value, float):
        digits, has_exponent, exponent = repr(value).partition("e")
        return f"{digits}e{int(exponent)}" if has_exponent else digits
    if isinstance(value, Undefined):
        return "undefined"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_inside(key)}: {_inside(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Iterable):
        return "[" + ", ".join(map(_inside, value)) + "]"
    return f"<macro {value.name}>" if isinstance(value, Macro) else str(value)


def _quoted(character: str) -> str:
    is_mark = category(character) in ("Mn", "Me") or character in _EXTENDING
    if character.isprintable() and character not in _QUOTED and not is_mark:
        return character
    if category(character) in ("Cn", "Co"):
        raise TemplateError(f"whether Rust prints {character!r} as it is, is not known")
    return _QUOTED.get(character) or f"\\u{{{ord(character):x}}}"


_ASCII = str.maketrans({character: _quoted(character) for character in map(chr, range(128))})
"""The same much faster."""


def _decimal(value: float) -> str:
    """A float without an exponent."""
    text = format(Decimal(repr(value)), "f")
    return text if "." in text or not text.lstrip("-").isdigit() else f"{text}.0"


def _tojson(
    value: Any, *, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    given = separators if indent is None else (",", ":")
    text = json.dumps(value, ensure_ascii=ensure_ascii, separators=given, sort_keys=sort_keys, default=_json_value)
    if "e-0" in text:
        text = _PADDED.sub(_unpadded, text)
    if indent is None:
        return text
    return indented(text, indent if isinstance(indent, str) else " " * indent, *(separators or (",", ": ")))


def _json_value(value: Any) -> Any:
    return None if isinstance(value, Undefined) else list(value)


def _unpadded(found: re.Match[str]) -> str:
    """A float as serde writes it: decimal from 1e-5."""
    text = found[0]
    if text.startswith('"'):
        return text
    return _decimal(float(text)) if text.endswith("e-05") else text.replace("e-0", "e-")


# --- filters, tests and methods ---


def _stripping(method: Callable[[str, str], str]) -> Callable[..., str]:
    return lambda value, characters=None: method(shown(value), _SPACE if characters is None else characters)


def _title(value: Any) -> str:
    return _WORD.sub(lambda word: word[0][0].upper() + "".join(map(str.lower, word[0][1:])), shown(value))


def _split(text: str, by: str | None = None, most: int = -1) -> list[str]:
    return [word for word in _SPACES.split(text) if word] if by is None else text.split(by, most)


def _lines(text: str) -> list[str]:
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def _join(value: Any, between: str = "") -> str:
    return between.join(map(shown, value or ()))


def _strftime_now(date_format: str) -> str:
    if _ODD_DATE.search(date_format):
        raise TemplateError(f"the date {date_format!r}")
    return strftime_now(date_format)


def _each(is_such: Callable[[str], bool], text: str) -> bool:
    return all(map(is_such, text))


_PREDICATES = (str.isalnum, str.isalpha, str.isdigit, str.islower, str.isnumeric, str.isupper)
_STRING_METHODS: Mapping[str, Callable[..., Any]] = {
    **{one.__name__: partial(_each, one) for one in _PREDICATES},
    "strip": _stripping(str.strip),
    "lstrip": _stripping(str.lstrip),
    "rstrip": _stripping(str.rstrip),
    "split": _split,
    "splitlines": _lines,
    "isspace": lambda text: not text.strip(_SPACE),
    "join": lambda text, items: _join(items, text),
}


@pass_environment
def _method(environment: _Minijinja, value: Any, name: str) -> Any:
    """The method `name` of a value, which is called."""
    if isinstance(value, str) and name in _STRING_METHODS:
        return partial(_STRING_METHODS[name], value)
    return ImmutableSandboxedEnvironment.getattr(environment, value, name)


_CALLED, _CONCATENATED, _LOOPED = " method", " concat", " loop"
"""Filters that no template can name."""
_FILTERS: Mapping[str, Callable[..., Any]] = {
    "capitalize": lambda value: shown(value)[:1].upper() + shown(value)[1:].lower(),
    "e": lambda value: shown(value).translate(_HTML),
    "escape": lambda value: shown(value).translate(_HTML),
    "indent": lambda value, *given, **named: do_indent(_LAST_END.sub("", shown(value)), *given, **named),
    "join": _join,
    "safe": lambda value: value,
    "string": shown,
    "title": _title,
    "tojson": _tojson,
    "trim": _stripping(str.strip),
    _CALLED: _method,
    _CONCATENATED: _join,
    _LOOPED: lambda value: () if value is None else value,
}
_OTHER_FILTERS = frozenset({"attr", "format", "pprint", "round"})
"""Filters that print something else in minijinja: templates with them are not read."""
_TESTS: Mapping[str, Callable[..., bool]] = {
    "iterable": lambda value: value is None or isinstance(value, Iterable),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "sequence": lambda value: isinstance(value, list | tuple | range),
}


class _Differences(NodeTransformer):
    """Puts a filter of ours where Jinja's own code treats a value otherwise."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - a name of Jinja
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes), _CONCATENATED)

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _LOOPED)
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.node, nodes.Getattr):
            node.node = _filtered(node.node.node, _CALLED, nodes.Const(node.node.attr))
        return node


def _filtered(value: nodes.Node, name: str, *arguments: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(arguments), [], None, None)


_VALUES = frozenset({dict, str, int, float, bool, list, tuple, range})


class _Minijinja(ImmutableSandboxedEnvironment):
    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed: nodes.Template = _Differences().visit(super()._parse(source, name, filename))
        return parsed.set_environment(self)  # type: ignore[return-value]

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Returns a field of a dict: the methods of a value are not its fields."""
        if type(obj) not in _VALUES:
            return super().getattr(obj, attribute)
        is_field = type(obj) is dict and attribute in obj
        return obj[attribute] if is_field else self.undefined(obj=obj, name=attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        is_field = isinstance(argument, str) and type(obj) in _VALUES
        return self.getattr(obj, argument) if is_field else super().getitem(obj, argument)


_ENVIRONMENT = _Minijinja(
    trim_blocks=True,
    lstrip_blocks=True,
    finalize=shown,
    optimized=False,
    extensions=[GenerationTag, loopcontrols],
)
_ENVIRONMENT.filters |= _FILTERS
for _name in _OTHER_FILTERS:
    del _ENVIRONMENT.filters[_name]
_ENVIRONMENT.tests |= _TESTS
_ENVIRONMENT.globals |= {"raise_exception": raise_exception, "strftime_now": _strftime_now}


def compile_template(text: str) -> Template:
    """Raises what Jinja raises for a broken template, and for one that cannot be rendered alike."""
    if "\r" in text:
        raise TemplateError("the template has carriage returns, which minijinja keeps")
    template = _ENVIRONMENT.from_string(text)
    template.globals = dict(template.globals)
    return template
