"""Renders a chat request into the text that the engine will encode.

As in vLLM (docs/engines.md#from-a-chat-to-tokens), messages and tools are rewritten (`conversation.py`), merged with
the template's variables, and rendered (`sandbox.py`). A template from a client is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal

from jinja2 import nodes

from router.errors import ConfigError, MalformedRequest
from router.prompt.conversation import (
    ChatMessage,
    ContentFormat,
    TemplateMessages,
    UnreadReason,
    Unrenderable,
    normal_messages,
    normal_tools,
    without_developer,
)
from router.prompt.media import MediaText, media_parts, text_with_pictures, with_media_parts
from router.prompt.pictures.picture_reader import Picture, PictureIdentities, PictureReader
from router.prompt.sandbox import compile_template, parse_template, render_template
from router.prompt.tokenizer import Tokenizer

_NO_VARIABLES = frozenset(
    {"chat_template", "conversation", "conversations", "messages", "tokenize", "padding", "truncation", "max_length"}
    | {"return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)
"""Names in `chat_template_kwargs` that steer the renderer instead of reaching the template."""
_ONLY_MESSAGES = {"messages"}
_DEVELOPER = re.compile(r"""(["'])developer\1""")


class _Variant:
    """One compiled template of a model. A few models have two: `default` and `tool_use`."""

    def __init__(self, text: str, content_format: Literal["auto", "string", "openai"]) -> None:
        self.text = text
        self.handles_developer = bool(_DEVELOPER.search(text))
        try:
            self.compiled = compile_template(text)
            detected = detect_content_format(parse_template(text))
        except Exception as error:  # a template may break its compiler in any way
            raise ConfigError(f"chat template does not compile: {error}") from error
        self.content_format = detected if content_format == "auto" else content_format


class ChatTemplate:
    """One model's chat template, compiled once. `template_text` replaces the tokenizer's own; `default_kwargs` are
    the engine's `--default-chat-template-kwargs`; `pictures` reads those of the model's family. Any thread may render.

    `ConfigError` if there is no template or it does not compile."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template_text: str | None = None,
        content_format: Literal["auto", "string", "openai"] = "auto",
        default_kwargs: Mapping[str, Any] | None = None,
        pictures: PictureReader | None = None,
    ) -> None:
        texts = template_text or tokenizer.chat_template or {}
        by_name: Mapping[str, str] = {"default": texts} if isinstance(texts, str) else texts
        if "default" not in by_name:
            raise ConfigError("the tokenizer has no chat template; set chat_template to a Jinja file")
        self._variants = {name: _Variant(text, content_format) for name, text in by_name.items()}
        self.source = by_name["default"]
        """The text of the template that renders chats without tools."""
        self.sources = tuple(by_name[name] for name in ("default", "tool_use") if name in by_name)
        """Its text, and that of the template that renders chats with tools where there are two."""
        self.content_format = content_format
        self.special_tokens = tokenizer.special_tokens
        self.default_kwargs = dict(default_kwargs or {})
        self.pictures = pictures
        self._default_variables = self._variables({})

    def render(self, body: Mapping[str, Any], *, keeps_empty_tools: bool = False) -> str:
        """The prompt of a chat request's body. `keeps_empty_tools`: an empty list of tools reaches the template.
        `MalformedRequest` where the engine would refuse it, with the template's own message; `Unrenderable` where it
        holds more than text."""
        variant, variables = self._chosen(body, keeps_empty_tools)
        return self._rendered(variant, variables, normal_messages(body.get("messages"), variant.content_format))

    def render_media(
        self,
        body: Mapping[str, Any],
        *,
        keeps_empty_tools: bool = False,
        identities: PictureIdentities | None = None,
    ) -> MediaText:
        """The prompt of a chat with pictures, sounds or videos; else as `render`. `identities`: how the engine
        identifies pictures, if that is known."""
        variant, variables = self._chosen(body, keeps_empty_tools)
        messages = with_media_parts(body.get("messages"), variant.content_format)
        conversation, parts = normal_messages(messages, variant.content_format), media_parts(body.get("messages"))
        pictures: tuple[Picture, ...] = ()
        # Where templates receive strings, which text stands for a picture is up to the model's class.
        if self.pictures is not None and identities and variant.content_format == "openai":
            pictures = self.pictures.leading(parts, identities)
        return text_with_pictures(parts, conversation, partial(self._rendered, variant, variables), pictures)

    def _chosen(self, body: Mapping[str, Any], keeps_empty_tools: bool) -> tuple[_Variant, Mapping[str, Any]]:
        variables = self._default_variables if body.keys() == _ONLY_MESSAGES else self._variables(body)
        if keeps_empty_tools and body.get("tools") == []:
            variables = {"tools": [], **variables}
        variant = self._variants["default"]
        if "tools" in variables:
            variant = self._variants.get("tool_use", variant)
        return variant, variables

    def _rendered(self, variant: _Variant, variables: Mapping[str, Any], conversation: list[ChatMessage]) -> str:
        if not variant.handles_developer and not isinstance(conversation, TemplateMessages):
            conversation = without_developer(conversation)
        given = {**self.special_tokens, **variables}
        try:
            return render_template(variant.compiled, variant.text, conversation, given)
        except RecursionError as error:
            raise Unrenderable(UnreadReason.TOO_LONG, str(error)) from error
        except Exception as error:  # a template is code: it raises on purpose, or fails on unexpected input
            raise MalformedRequest(f"the chat template refused the request: {error}", param="messages") from error

    def _variables(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The template's variables besides messages. Weakest first: the engine's defaults, the tools, the request's
        `chat_template_kwargs`, the request's own fields. None and "auto" never override."""
        asked = checked(body, "chat_template_kwargs", dict) or {}
        if body.get("chat_template") is not None or asked.get("chat_template") is not None:
            raise MalformedRequest("a chat template in the request is not accepted", param="chat_template")
        tools = {"tools": normal_tools(body.get("tools"))}
        merged = self.default_kwargs | _set(tools) | _set(asked) | _set(_own_fields(body, asked))
        return {name: value for name, value in merged.items() if name not in _NO_VARIABLES}


def _own_fields(body: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Variables that are fields of the request. `reasoning_effort` also sets `enable_thinking`, unless
    `chat_template_kwargs` do."""
    fields = {
        "add_generation_prompt": checked(body, "add_generation_prompt", bool, True),
        "continue_final_message": checked(body, "continue_final_message", bool, False),
        "documents": checked(body, "documents", list),
        "reasoning_effort": checked(body, "reasoning_effort", str),
    }
    if fields["add_generation_prompt"] and fields["continue_final_message"]:
        message = "continue_final_message and add_generation_prompt cannot both be true"
        raise MalformedRequest(message, param="continue_final_message")
    if fields["reasoning_effort"] is not None and "enable_thinking" not in asked:
        fields["enable_thinking"] = fields["reasoning_effort"] != "none"
    return fields


def checked(body: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """A field of the body, or `default` if it is absent or null. `MalformedRequest` for another type."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise MalformedRequest(f"{name} must be a {kind.__name__}", param=name)
    return value


def _set(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None and value != "auto"}


# --- which contents a template expects ---
#
# vLLM reads the template: if it loops over the content of a message, the content must be a list. This follows the same
# names to the same results (vLLM 0.32, `renderers/hf.py`), heuristics included.


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


def detect_rust_format(text: str) -> ContentFormat:
    """The same as vLLM's front end in Rust detects it: loops in macros are like others, and unpacking loops ignored."""
    root = parse_template(text)
    loops = [(loop.target.name, loop.iter) for loop in root.find_all(nodes.For) if isinstance(loop.target, nodes.Name)]
    conversations = list(_names_of_conversation(root))
    messages = [target for target, over in loops if any(_reads(over, name) for name in conversations)]
    of_content = [
        _reads_name(over, "content") or any(_reads(over, message, "content") for message in messages)
        for _, over in loops
    ]
    return "openai" if any(of_content) else "string"


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
