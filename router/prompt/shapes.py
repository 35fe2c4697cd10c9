"""Which text does a chat template put around contents that it only repeats?

Most templates copy what people said to where it belongs: for one sequence of roles, everything else is always the same.
So a template is rendered once for such a sequence, with blanks for contents. A blank goes wherever text goes; asked
about what it holds ("does `</think>` stand in it?"), it gives the usual answer, no, and notes the question; whatever
else would depend on a content gives up. What comes out is a form that is filled in without the template, exact wherever
the same questions have the same answers. This file never renders by itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, TypeAlias

import msgspec
import xxhash
from jinja2 import Undefined, nodes
from jinja2.visitor import NodeTransformer

MAX_MESSAGES = 256
"""Longer conversations are left to the template: their forms would fill the memory."""

Edits: TypeAlias = tuple[tuple[str, str | None], ...]
"""What is done to a content before it is put in: methods of `str` that strip characters."""
Question: TypeAlias = tuple[str, Edits, str]
"""About a content, edited so; the answer must be no."""
Render: TypeAlias = Callable[[list[dict[str, Any]]], str]

_ASK: dict[str, Callable[[str, str], bool]] = {
    "contains": lambda content, text: text in content,
    "starts": str.startswith,
    "ends": str.endswith,
    "equals": lambda content, text: content == text,
}
_MARK = ' \uf8ff"<Aa{}\uf8fe\n'
"""Stands for a blank in text; hardly anything can be done to it unseen: strip, escape, change its case."""
_MARKED = re.compile(_MARK.format(r"(\d+)"))
_PRIVATE = re.compile("[\uf8fe\uf8ff]")
_HARMLESS_FILTERS = frozenset(
    {"trim", "string", "default", "d", "length", "count", "first", "last", "list", "reverse"}
    | {"selectattr", "rejectattr"}
)
"""They call methods of what they are given, or give back what they were given."""
_QUOTED = re.compile(r"""'([^'\n]{1,64})'|"([^"\n]{1,64})\"""")
_SCOPES = {"_loop_vars", "_block_vars"}
"""What Jinja itself passes to whatever is called."""
_UNSTEADY = re.compile(r"strftime_now|now\(|\brandom\b")


class TemplateSkeleton(msgspec.Struct, frozen=True, gc=False):
    """A form: `literals[0]`, content, `literals[1]`, content, ..., `literals[-1]`."""

    literals: tuple[str, ...]
    edits: tuple[Edits, ...]
    questions: tuple[tuple[Question, ...], ...]
    """By content."""
    prefixes: tuple[int, ...]
    """`prefixes[n]` tells apart all that stands before content n: forms that have it in common agree on the text up to
    there."""

    def fill(self, contents: Sequence[str], first: int = 0) -> list[str] | None:
        """The parts of the text from content `first` on, of which `contents` begin: contents and literals by turns, and
        in front of the very first the literal before it. None where a content is unusual, and the template itself must
        say."""
        parts = [] if first else [self.literals[0]]
        for content, edits, questions, literal in zip(
            contents, self.edits[first:], self.questions[first:], self.literals[first + 1 :], strict=True
        ):
            if questions and any(_ASK[ask](_edited(content, before), text) for ask, before, text in questions):
                return None
            parts.append(_edited(content, edits) if edits else content)
            parts.append(literal)
        return parts


def trace(render: Render, roles: Sequence[str]) -> TemplateSkeleton | None:
    """The form of conversations with these roles; None where the template does more with contents than repeat each
    once, in order. `render` must be of a template that `instrument` has prepared."""
    if len(roles) > MAX_MESSAGES:
        return None
    notes = _Notes([[] for _ in roles], [])
    messages = [{"role": role, "content": notes.blank(number, ())} for number, role in enumerate(roles)]
    try:
        literals = _MARKED.split(render(messages))
    except Exception:  # it refuses these roles, or would know more: the template itself will say
        return None
    found = [notes.blanks[int(number)] for number in literals[1::2]]
    same: dict[Any, Any] = {}  # most of a form is the same from turn to turn: kept once
    literals = [same.setdefault(literal, literal) for literal in literals[::2]]
    if [number for number, _ in found] != list(range(len(roles))) or any(map(_PRIVATE.search, literals)):
        return None
    edits = tuple([same.setdefault(edits, edits) for _, edits in found])
    questions = tuple([same.setdefault(asked, asked) for asked in map(_each_once, notes.questions)])
    return TemplateSkeleton(tuple(literals), edits, questions, _prefixes(literals, edits, questions))


def instrument(template: Any, text: str) -> None:
    """Let blanks be known wherever this template, compiled from that text, joins texts, filters or tests them.

    `ContentDependent` where it would be in vain."""
    environment = template.environment
    parsed = environment.parse(text)
    if _UNSTEADY.search(text) or _PRIVATE.search(text) or _formats(parsed):
        raise ContentDependent("it formats texts, or does not always say the same")
    instrumented = template.from_code(environment, environment.compile(_SearchAsTest().visit(parsed)), template.globals)
    template.root_render_func, template.blocks = instrumented.root_render_func, instrumented.blocks
    environment.concat = _join
    environment.call = _unless_of_text(environment.call)
    environment.getitem = _unless_found_by_blank(environment.getitem)
    template.root_render_func.__globals__.update(str_join=_join, markup_join=_join)
    for name, filtered in environment.filters.items():
        if name not in _HARMLESS_FILTERS:
            environment.filters[name] = _unless_blank(filtered)
    environment.filters["trim"] = _unless_by_blank(environment.filters["trim"])
    environment.tests["in"] = _unless_in_text(environment.tests["in"])
    environment.tests["sameas"] = _unless_blank(environment.tests["sameas"])
    environment.tests["sequence"] = _also_blank(environment.tests["sequence"])
    environment.tests["iterable"] = _also_blank(environment.tests["iterable"])


def probes(text: str) -> list[str]:
    """Contents that a template of this text might treat in its own way: those made of the words that it knows."""
    words = sorted({word for quoted in _QUOTED.findall(text) for word in quoted if word})
    forms = [form for word in words for form in (word, f"{word}x", f"x{word}", f"x{word}y")]
    return [*forms, *("", " ", "x", " x\n", "\n\nx\ty  ", "[1, 2]", '{"a": "b"}', "<b>&amp;</b>", "İx ß \u2028")]


def is_instrumented(template: Any) -> bool:
    """Was this very template prepared?"""
    return template.environment.concat is _join


class ContentDependent(Exception):
    """What the template says depends on a content in a way that is not understood here."""


class _Notes(msgspec.Struct):
    """What a template asked of its blanks, by content; and the blanks it was given: (content, edits)."""

    questions: list[list[Question]]
    blanks: list[tuple[int, Edits]]

    def blank(self, content: int, edits: Edits) -> Placeholder:
        made = Placeholder(_MARK.format(len(self.blanks)))
        made.of = self, content, edits
        self.blanks.append((content, edits))
        return made


class Placeholder(str):
    """A content that is not known, or, where it is `of` nothing, text with one in it."""

    __slots__ = ("of",)
    of: tuple[_Notes, int, Edits] | None

    def _asked(self, ask: str, text: Any) -> bool:
        if self.of is None or type(text) is not str:
            raise ContentDependent
        notes, content, edits = self.of
        notes.questions[content].append((ask, edits, text))
        return False

    def _stripped(self, method: str, characters: Any) -> Placeholder:
        if self.of is None or not (characters is None or type(characters) is str):
            raise ContentDependent
        notes, content, edits = self.of
        return notes.blank(content, (*edits, (method, characters)))

    def strip(self, characters: Any = None, /) -> Placeholder:
        return self._stripped("strip", characters)

    def lstrip(self, characters: Any = None, /) -> Placeholder:
        return self._stripped("lstrip", characters)

    def rstrip(self, characters: Any = None, /) -> Placeholder:
        return self._stripped("rstrip", characters)

    def startswith(self, text: Any, /) -> bool:  # type: ignore[override]
        return self._asked("starts", text)

    def endswith(self, text: Any, /) -> bool:  # type: ignore[override]
        return self._asked("ends", text)

    def __contains__(self, text: Any, /) -> bool:
        return self._asked("contains", text)

    def __eq__(self, text: object, /) -> bool:
        return self._asked("equals", text)

    def __ne__(self, text: object, /) -> bool:
        return not self._asked("equals", text)

    def __bool__(self) -> bool:
        return not self._asked("equals", "")

    def __hash__(self) -> int:
        raise ContentDependent  # Jinja takes a `TypeError` for a key that is not there

    def __add__(self, text: str, /) -> str:
        return _join((self, text))

    def __radd__(self, text: str, /) -> str:
        return _join((text, self))

    def __str__(self) -> str:
        return self


def _matters(*_: Any, **__: Any) -> NoReturn:
    raise ContentDependent


_KNOWN_TO_BLANKS = set(Placeholder.__dict__) | {
    *("__new__", "__init__", "__init_subclass__", "__subclasshook__", "__class__", "__getattribute__", "__setattr__"),
    *("__delattr__", "__doc__", "__dir__", "__reduce__", "__reduce_ex__", "__getstate__", "__sizeof__"),
    "__getnewargs__",
}
for _name in set(dir(str)) - _KNOWN_TO_BLANKS:
    setattr(Placeholder, _name, _matters)


def _join(texts: Iterable[Any]) -> str:
    """As `"".join`, but a blank in it stays one."""
    texts = [text if isinstance(text, str) else str(text) for text in texts]
    joined = str.join("", texts)
    if not any(isinstance(text, Placeholder) for text in texts):
        return joined
    mixed = Placeholder(joined)
    mixed.of = None
    return mixed


def _unless_blank(filtered: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*given: Any, **named: Any) -> Any:
        if _has_blank(given) or _has_blank(named.values()):
            raise ContentDependent
        return filtered(*given, **named)

    return _as_marked(filtered, checked)


def _unless_found_by_blank(getitem: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """What is not there under a blank's mark may be there under a content: as a key, or by the name of a method."""

    def checked(searched: Any, key: Any) -> Any:
        if isinstance(key, Placeholder):
            raise ContentDependent
        return getitem(searched, key)

    return checked


def _unless_by_blank(trim: Callable[..., str]) -> Callable[..., str]:
    """What may be a blank is what is trimmed, not what of."""

    def checked(value: Any, *given: Any, **named: Any) -> str:
        if _has_blank([*given, *named.values()]):
            raise ContentDependent
        return trim(value, *given, **named)

    return checked


def _unless_of_text(call: Callable[..., Any]) -> Callable[..., Any]:
    """Methods of plain text see only the marks of the blanks that they are given."""

    def checked(context: Any, called: Any, /, *given: Any, **named: Any) -> Any:
        of_text = isinstance(getattr(called, "__self__", None), str)
        if of_text and _has_blank([*given, *(named[name] for name in named.keys() - _SCOPES)]):
            raise ContentDependent
        return call(context, called, *given, **named)

    return checked


def _unless_in_text(test: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """So does a search for a blank in plain text."""

    def checked(value: Any, searched: Any) -> bool:
        if isinstance(value, Placeholder) and isinstance(searched, str):
            raise ContentDependent
        return test(value, searched)

    return checked


class _SearchAsTest(NodeTransformer):
    """`a in b` as the test `in`, which says the same and can be replaced."""

    def visit_Compare(self, compare: nodes.Compare) -> nodes.Node:  # noqa: N802 - the visitor's own names
        self.generic_visit(compare)
        if not any(asked.op in ("in", "notin") for asked in compare.ops):
            return compare
        if len(compare.ops) > 1:
            raise ContentDependent("it searches in a chain of comparisons")
        [asked], line = compare.ops, compare.lineno
        found = nodes.Test(compare.expr, "in", [asked.expr], [], None, None, lineno=line)
        return found if asked.op == "in" else nodes.Not(found, lineno=line)


def _also_blank(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Placeholder) or test(value)


def _formats(parsed: nodes.Template) -> bool:
    """Might there be a `"%s" % ...`, not only a number's remainder? What goes into it comes out unknown."""
    return any(not isinstance(mod.right, nodes.Const) for mod in parsed.find_all(nodes.Mod))


def _as_marked(filtered: Callable[..., Any], checked: Callable[..., Any]) -> Callable[..., Any]:
    """With the notes that Jinja reads of a filter: what it wants to be passed."""
    vars(checked).update(getattr(filtered, "__dict__", {}))
    return checked


def _has_blank(values: Iterable[Any]) -> bool:
    for value in values:
        if isinstance(value, dict):
            value = value.values()
        elif isinstance(value, Placeholder):
            return True
        elif isinstance(value, str | Undefined) or not hasattr(value, "__iter__"):
            continue
        elif not isinstance(value, list | tuple):  # who knows what comes out of it
            return True
        if _has_blank(value):
            return True
    return False


def _edited(content: str, edits: Edits) -> str:
    for method, characters in edits:
        content = getattr(content, method)(characters)
    return content


def _each_once(asked: Iterable[Question]) -> tuple[Question, ...]:
    return tuple(dict.fromkeys(asked))


def _prefixes(literals: Sequence[str], edits: Sequence[Edits], questions: Sequence[Any]) -> tuple[int, ...]:
    parts = [literals[0], *zip(edits, questions, literals[1:], strict=True)]
    prefix = 0
    return tuple([prefix := xxhash.xxh3_64_intdigest(msgspec.json.encode(part), prefix) for part in parts])
