"""Detects whether a chat template expects a message's content as a string or as a list of parts.

vLLM reads the template: if it loops over the content of a message, the content must be a list. This file follows the
same names to the same results (vLLM 0.32, `renderers/hf.py`), heuristics included.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from jinja2 import nodes

from router.prompt.sandbox import parse_template

ContentFormat = Literal["string", "openai"]
_MEDIA_WORDS = ("image", "audio", "video", "vision")
_NAMES = ("message", "msg", "m")


class _Undecidable(Exception):
    """A loop or assignment unpacks into several names, where vLLM gives up."""


def detect_content_format(template: nodes.Template) -> ContentFormat:
    """`openai` (a list of parts) if the template loops over a message's content, else `string`."""
    try:
        return "openai" if any(_content_loops(template)) else "string"
    except _Undecidable:
        return "string"


def detect_sglang_format(text: str) -> ContentFormat:
    """The same as SGLang 0.5.23 detects it (`parser/jinja_template_utils.py`), from a template's source."""
    if any(word in text for word in _MEDIA_WORDS):
        return "openai"
    loops = parse_template(text).find_all(nodes.For)
    return "openai" if any(_reads(loop.iter, name, "content") for loop in loops for name in _NAMES) else "string"


def _content_loops(root: nodes.Template) -> Iterator[bool]:
    """True for each loop over content: a message's, a macro argument that receives it, or any name `content` outside of
    macros."""
    messages = list(_names_of_messages(root))
    of_macros: dict[int, set[str]] = {}
    for macro in root.find_all(nodes.Macro):
        receivers = _content_parameters(root, macro, messages)
        of_macros |= {
            id(loop): receivers for loop in macro.find_all(nodes.For) if receivers or id(loop) not in of_macros
        }
    for loop in root.find_all(nodes.For):
        of_message = any(_reads(loop.iter, message, "content") for message in messages)
        names = of_macros.get(id(loop), {"content"})
        if of_message or (isinstance(loop.iter, nodes.Name) and loop.iter.name in names):
            _single_name(loop.target)
            yield True


def _content_parameters(root: nodes.Template, macro: nodes.Macro, messages: list[str]) -> set[str]:
    """Parameters of `macro` that receive a message's content anywhere in the template."""
    parameters = [argument.name for argument in macro.args]
    receivers = set()
    for call in root.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        given = [*zip(parameters, call.args, strict=False), *((pair.key, pair.value) for pair in call.kwargs)]
        for parameter, value in given:
            if parameter in parameters and any(_reads(value, message, "content") for message in messages):
                receivers.add(parameter)
    return receivers


def _names_of_messages(root: nodes.Template) -> Iterator[str]:
    conversations = list(_names_of_conversation(root))
    for loop in root.find_all(nodes.For):
        if any(_reads(loop.iter, name) for name in conversations):
            yield _single_name(loop.target)


def _names_of_conversation(root: nodes.Template) -> Iterator[str]:
    """`messages`, and every name to which it or a part of it is assigned."""
    pending = ["messages"]
    yield "messages"
    for name in pending:
        for assignment in root.find_all(nodes.Assign):
            if _reads(assignment.node, name):
                target = _single_name(assignment.target)
                yield target
                if target not in pending:
                    pending.append(target)


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether `node` is the variable `name` (or its attribute or item `key`), possibly filtered, tested or sliced."""
    if isinstance(node, nodes.Filter | nodes.Test):
        return _reads(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _reads(node.node, name, key)
    if key is None:
        return _reads_name(node, name)
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == key and _reads_name(node.node, name)
    return isinstance(node, nodes.Getattr) and node.attr == key and _reads_name(node.node, name)


def _reads_name(node: nodes.Node | None, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _single_name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _Undecidable
    return target.name
