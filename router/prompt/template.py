"""How does a chat request become the text that the engine will encode?

As vLLM 0.32 does it (reference: protocols.md 4.4): messages and tools are rewritten (`conversation.py`), merged with
the template's variables, and rendered by the code of `transformers` in its sandbox. This file never encodes text,
and never accepts a template from a client.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from router.errors import ConfigError, MalformedRequest
from router.prompt.content_format import ContentFormat, detect_content_format
from router.prompt.conversation import Unrenderable, normal_messages, plain_contents, without_developer
from router.prompt.shapes import ContentDependent, TemplateSkeleton, instrument, is_instrumented, probes, trace
from router.prompt.tokenizer import Tokenizer
from router.prompt.tools import normal_tools

__all__ = ["ChatTemplate", "Unrenderable", "checked"]

_NO_VARIABLES = frozenset(
    {"chat_template", "conversation", "conversations", "messages", "tokenize", "padding", "truncation", "max_length"}
    | {"return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)
"""Names in `chat_template_kwargs` that steer the renderer instead of reaching the template."""
_METHODS = frozenset(dir(dict))
_ONLY_MESSAGES = {"messages"}
_DEVELOPER = re.compile(r"""(["'])developer\1""")
SHAPES = 1024
"""Sequences of roles whose forms are remembered."""
_TRACED = "{#traced#}\n"
"""Before a template's text, it makes another template that says the same: an instrumented one. The newline
goes with the comment (`trim_blocks`), so that the text begins a line as ever."""
_TRIED_ROLES = (("user",), ("system", "user"), ("user", "assistant", "user"), ("system", "user", "assistant", "user"))


class ChatTemplate:
    """One model's chat template, compiled once. `template_text` replaces the tokenizer's own; `default_kwargs` are
    the engine's `--default-chat-template-kwargs`. Rendering keeps no state, so any thread may do it.

    `ConfigError` if there is no template or it does not compile."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template_text: str | None = None,
        content_format: Literal["auto", "string", "openai"] = "auto",
        default_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        texts = template_text or tokenizer.chat_template or {}
        self._texts: Mapping[str, str] = {"default": texts} if isinstance(texts, str) else texts
        if "default" not in self._texts:
            raise ConfigError("the tokenizer has no chat template; name one with chat_template")
        detected = {name: _compile(text) for name, text in self._texts.items()}
        self._formats = detected if content_format == "auto" else dict.fromkeys(detected, content_format)
        self._special_tokens = tokenizer.special_tokens
        self._default_kwargs = dict(default_kwargs or {})
        self._know_developers = {name for name, text in self._texts.items() if _DEVELOPER.search(text)}
        self._usual_variables = self._variables({})
        self.shape = lru_cache(SHAPES)(self._traced) if self._is_repetitive() else _shapeless
        """The form of conversations with these roles and nothing else; None where there is none."""

    def render(self, body: Mapping[str, Any]) -> str:
        """The prompt of a chat request's body. `MalformedRequest` where the engine would refuse it, with the
        template's own message; `Unrenderable` where it holds more than text."""
        plain = plain_contents(body["messages"]) if body.keys() == _ONLY_MESSAGES else None
        shape = self.shape(plain[0]) if plain else None
        parts = shape.fill(plain[1]) if plain and shape else None
        return self._render(body) if parts is None else "".join(parts)

    def _render(self, body: Mapping[str, Any]) -> str:
        variables = self._usual_variables if body.keys() == _ONLY_MESSAGES else self._variables(body)
        name = "tool_use" if "tools" in variables and "tool_use" in self._texts else "default"
        return self._worded(self._texts[name], name, body.get("messages"), variables)

    def _worded(self, text: str, name: str, messages: Any, variables: Mapping[str, Any]) -> str:
        conversation = normal_messages(messages, self._formats[name])
        if name not in self._know_developers:
            conversation = without_developer(conversation)
        return _render(text, conversation, {**self._special_tokens, **variables})

    def _traced(self, roles: tuple[str, ...]) -> TemplateSkeleton | None:
        text = _TRACED + self._texts["default"]
        if not is_instrumented(_compiled(text)):  # the first, or another copy because many were compiled since
            instrument(_compiled(text), text)
        return trace(lambda messages: self._worded(text, "default", messages, self._usual_variables), roles)

    def _is_repetitive(self) -> bool:
        """Does it repeat contents, so that forms can be had of it? Only where these were seen to be right."""
        try:
            shapes = {roles: shape for roles in _TRIED_ROLES if (shape := self._traced(roles))}
        except ContentDependent:
            return False
        contents = probes(self._texts["default"])
        return bool(shapes) and all(self._agree(roles, shape, contents) for roles, shape in shapes.items())

    def _agree(self, roles: Sequence[str], shape: TemplateSkeleton, contents: Sequence[str]) -> bool:
        """Does the form say what the template does, wherever it says anything?"""
        for start in range(len(contents)):
            said = [contents[(start + turn) % len(contents)] for turn in range(len(roles))]
            parts = shape.fill(said)
            messages = [{"role": role, "content": content} for role, content in zip(roles, said, strict=True)]
            if parts is not None and "".join(parts) != self._render({"messages": messages}):
                return False
        return True

    def _variables(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """What the template may name besides messages, weakest first: the engine's defaults, the tools, the
        request's `chat_template_kwargs`, the request's own fields. None and "auto" never override."""
        asked = checked(body, "chat_template_kwargs", dict) or {}
        if body.get("chat_template") is not None or asked.get("chat_template") is not None:
            raise MalformedRequest("a chat template in the request is not accepted", param="chat_template")
        tools = {"tools": normal_tools(body.get("tools"))}
        merged = self._default_kwargs | _set(tools) | _set(asked) | _set(_own_fields(body, asked))
        return {name: value for name, value in merged.items() if name not in _NO_VARIABLES}


def _own_fields(body: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """Variables that are fields of the request. Asking for reasoning turns thinking on or off with it, unless
    `chat_template_kwargs` speak of that."""
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


def _shapeless(_: tuple[str, ...]) -> None:
    return None


def checked(body: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """A field of the body, or `default` where it is absent or null. `MalformedRequest` unless it is of its kind."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise MalformedRequest(f"{name} must be a {kind.__name__}", param=name)
    return value


def _set(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None and value != "auto"}


def _compiled(text: str) -> Any:
    """By `transformers`, which remembers the last hundred."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template(text)


def _compile(text: str) -> ContentFormat:
    """Compile a template, which `transformers` remembers by its text, and tell which content it expects."""
    try:
        compiled = _compiled(text)
        _read_fields_quickly(compiled.environment)
        compiled.globals = dict(compiled.globals)  # copied for each rendering, and a ChainMap takes 7 us to copy
        return detect_content_format(compiled.environment.parse(text))
    except Exception as error:  # a template may break its compiler in any way
        raise ConfigError(f"chat template: {error}") from error


def _read_fields_quickly(environment: Any) -> None:
    """The sandbox first tries whether `message.role` is a method, which it never is, and that is half of the time that
    rendering takes. What could be one still goes the long way."""
    as_ever, undefined = type(environment).getattr.__get__(environment), environment.undefined

    def quick(of: Any, name: str) -> Any:
        if type(of) is not dict or name in _METHODS:
            return as_ever(of, name)
        return of[name] if name in of else undefined(obj=of, name=name)

    environment.getattr = quick


def _render(text: str, conversation: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered, _ = render_jinja_template(conversations=[conversation], chat_template=text, **variables)
    except Exception as error:  # a template is code: it raises on purpose, or trips over what it was given
        raise MalformedRequest(f"the chat template refused the request: {error}", param="messages") from error
    return str(rendered[0])
