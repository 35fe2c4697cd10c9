"""Renders chats of gpt-oss in the Harmony format, as vLLM 0.32 does instead of using the model's template.

Source: docs/apis.md#harmony. `oss-harmony` writes the system
message and the declarations of tools. Texts of clients are encoded by the model's own tokenizer: the library's encoder
takes seconds for some of them and holds the interpreter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import msgspec

from router.errors import ConfigError, MalformedRequest
from router.prompt.conversation import UnreadReason, Unrenderable, reasoning_of

EFFORTS = ("low", "medium", "high")
MAX_DECLARATION_BYTES = 16 * 1024
"""Maximum size of a tool. The library encodes it in about 5 ms, unless it has words like `_LONG_WORD`."""
_LONG_WORD = re.compile(r"[^\s\"{}\[\],:]{256}")
_SYSTEM_ROLES = ("system", "developer")
_DATE = re.compile(r"Current date: ([0-9-]{10})\n")
DATE_TOKENS = 48
"""The date is within as many tokens."""
_SECTIONS = "\n\n"
ANSWER = "<|start|>assistant"
CONSTRAIN = "<|constrain|>json"
"""How the head of a call ends in the Rust front end."""
_NAMESPACE = "# Tools\n\n## functions\n\nnamespace functions {\n\n"
_NO_PARAMETERS = "() => any;"
_NAMESPACE_END = "\n\n} // namespace functions"


HarmonyMessage: TypeAlias = tuple[str, list[str], str]
"""The head of a message, its texts, and the mark behind it."""


class SeparateTexts(msgspec.Struct, frozen=True):
    """A prompt whose texts are encoded one by one."""

    texts: list[str]


class Harmony:
    """The renderer of one model, in place of a chat template. `special_tokens`: their texts. `today` returns the date
    that prompts contain, as YYYY-MM-DD. `ConfigError` if `oss-harmony` is not installed."""

    sources = ("{{ strftime_now('') }}",)
    """gpt-oss's own template calls this function, which vLLM's search for late system messages does not define."""
    source = sources[0]
    pictures = None

    def __init__(self, special_tokens: Iterable[str], today: Callable[[], str]) -> None:
        try:
            import openai_harmony
        except ImportError as error:
            raise ConfigError(
                "`chat_format: harmony` needs oss-harmony: run `pip install '.[harmony]'` in the clone"
            ) from error
        self._today = today
        self._library: Any = openai_harmony
        self._encoding = openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
        self._special = re.compile("|".join(map(re.escape, special_tokens)))
        self._system = lru_cache(16)(self._new_system)
        self._declaration = lru_cache(1024)(self._new_declaration)

    def render(self, body: Mapping[str, Any]) -> SeparateTexts:
        """The prompt of a chat. Raises `MalformedRequest` for what the engine refuses, `Unrenderable` for what it may
        render otherwise."""
        try:
            messages = [dict(message) for message in body["messages"]]
            return self._rendered(messages, body.get("tools") or [], body.get("reasoning_effort"))
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise Unrenderable(UnreadReason.NOT_CONVERTED, f"not a chat that Harmony knows: {error}") from error

    def advice(self, ours: Sequence[int], engine: Sequence[int]) -> str:
        """What to do about an engine whose prompts have another date; "" if they have the same."""
        own, other = self._date_in(ours), self._date_in(engine)
        if not own or not other or own == other:
            return ""
        return (
            f"its prompts say `Current date: {other}`, those of the router {own}: set VLLM_SYSTEM_START_DATE on all "
            "pods, and `harmony_date` of the model to the same date; or run all in one time zone (TZ). A fixed date "
            "also keeps prompts cached over midnight"
        )

    def _date_in(self, tokens: Sequence[int]) -> str:
        found = _DATE.search(self._encoding.decode(list(tokens[:DATE_TOKENS])))
        return found[1] if found else ""

    def _rendered(self, messages: list[dict[str, Any]], tools: Sequence[Any], effort: str | None) -> SeparateTexts:
        if effort not in (None, *EFFORTS):
            raise MalformedRequest(f"Harmony knows no reasoning_effort {effort!r}.", param="reasoning_effort")
        instructions = None
        if messages and messages[0].get("role") in _SYSTEM_ROLES:
            instructions = _flat(messages.pop(0).get("content"))
        sections = (
            [f"# Instructions\n\n{self.plain(instructions)}"]
            if instructions or (tools and instructions is not None)
            else []
        )
        preamble = self.sections(sections, [tool["function"] for tool in tools])
        return self.assembled(effort, preamble, bool(tools), _harmony_messages(messages))

    def sections(self, sections: list[str], functions: Sequence[Mapping[str, Any]], unknown: str = "") -> str:
        """The text of a developer's message: its sections, and what declares functions. `unknown`: what stands in place
        of parameters that are not given."""
        if functions:
            declared = "\n\n".join(self._declared(function, unknown) for function in functions)
            sections = [*sections, f"{_NAMESPACE}{declared}{_NAMESPACE_END}"]
        return _SECTIONS.join(sections)

    def assembled(
        self, effort: str | None, preamble: str, has_tools: bool, messages: Iterable[HarmonyMessage], end: str = ANSWER
    ) -> SeparateTexts:
        """The prompt. `preamble`: the first message of the developer, "" for none; `end`: what begins the answer."""
        texts = [self._system(effort or "medium", self._today(), has_tools)]
        if preamble:
            texts[-1] += f"<|start|>developer<|message|>{preamble}<|end|>"
        for head, parts, mark in _without_old_analysis(list(messages)):
            texts[-1] += f"<|start|>{self._plain_head(head)}<|message|>"
            for number, part in enumerate(parts):
                if number:
                    texts.append("")
                texts[-1] += self.plain(part)
            texts[-1] += mark
        texts[-1] += end
        return SeparateTexts([text for text in texts if text])

    def _plain_head(self, head: str) -> str:
        role, mark, channel = head.partition("<|channel|>")
        front = channel.removesuffix(CONSTRAIN)
        return f"{self.plain(role)}{mark}{self.plain(front)}{channel[len(front) :]}"

    def plain(self, text: str) -> str:
        """The text. Raises `Unrenderable` if it has the text of a special token, which Harmony takes for text."""
        if not isinstance(text, str):
            raise TypeError(f"{type(text).__name__} in place of text")
        if self._special.search(text):
            raise Unrenderable(UnreadReason.NOT_CONVERTED, "a text contains the text of a special token")
        return text

    def _declared(self, function: Mapping[str, Any], unknown: str) -> str:
        parameters = msgspec.json.encode(function.get("parameters"))
        declared = self.plain(self._declaration(function["name"], function.get("description") or "", parameters))
        return declared.removesuffix(_NO_PARAMETERS) + f"({unknown}) => any;" if parameters == b"null" else declared

    def _new_system(self, effort: str, date: str, has_tools: bool) -> str:
        library = self._library
        content = library.SystemContent.new().with_reasoning_effort(library.ReasoningEffort[effort.upper()])
        content = content.with_conversation_start_date(date)
        message = library.Message.from_role_and_content(library.Role.SYSTEM, content)
        options = library.RenderOptions(conversation_has_function_tools=has_tools)
        rendered: str = self._encoding.decode_utf8(self._encoding.render(message, options))
        return rendered

    def _new_declaration(self, name: str, description: str, parameters: bytes) -> str:
        """What the developer message declares a tool as."""
        if len(name) + len(description) + len(parameters) > MAX_DECLARATION_BYTES or any(
            map(_LONG_WORD.search, (name, description, parameters.decode()))
        ):
            raise Unrenderable(UnreadReason.TOO_LONG, "the declaration of a tool")
        library = self._library
        tool = library.ToolDescription.new(name, description, json.loads(parameters))
        content = library.DeveloperContent.new().with_function_tools([tool])
        message = library.Message.from_role_and_content(library.Role.DEVELOPER, content)
        try:
            rendered = self._encoding.decode_utf8(self._encoding.render(message))
        except library.HarmonyError as error:
            raise ValueError(str(error)) from error
        return str(rendered.partition(_NAMESPACE)[2].rpartition(_NAMESPACE_END)[0])


def _harmony_messages(messages: Sequence[Mapping[str, Any]]) -> Iterator[HarmonyMessage]:
    names = {call.get("id"): call["function"]["name"] for each in messages for call in each.get("tool_calls") or ()}
    for message in messages:
        role, content, calls = message["role"], message.get("content"), message.get("tool_calls") or ()
        reasoning = reasoning_of(message) if role == "assistant" else None
        if role == "assistant" and calls:
            if text := _flat(content):
                yield "assistant<|channel|>commentary", [text], "<|end|>"
            if reasoning:
                yield "assistant<|channel|>analysis", [reasoning], "<|end|>"
            for call in calls:
                name, arguments = call["function"]["name"], call["function"].get("arguments")
                text = json.dumps(arguments) if isinstance(arguments, dict) else arguments or ""
                yield f"assistant to=functions.{name}<|channel|>commentary json", [text], "<|call|>"
        elif role == "tool":
            name = names.get(message.get("tool_call_id") or "", "")
            yield f"functions.{name}<|channel|>commentary to=assistant", [_flat(content) or ""], "<|end|>"
        elif role == "assistant":
            if reasoning:
                yield "assistant<|channel|>analysis", [reasoning], "<|end|>"
            texts = _texts(content)
            if texts and texts[0]:
                yield "assistant<|channel|>final", texts, "<|end|>"
        elif role in _SYSTEM_ROLES:
            if (text := _flat(content)) is not None:
                yield "developer", [f"# Instructions\n\n{text}"], "<|end|>"
        elif role == "user":
            yield "user", _texts(content), "<|end|>"
        else:
            raise ValueError(f"role {role!r}")


def _without_old_analysis(messages: list[HarmonyMessage]) -> Iterator[HarmonyMessage]:
    """The messages without the analysis in front of the last final one."""
    finals = [i for i, message in enumerate(messages) if message[0] == "assistant<|channel|>final"]
    for i, message in enumerate(messages):
        if not (finals and i < finals[-1] and message[0] == "assistant<|channel|>analysis"):
            yield message


def _texts(content: str | Sequence[Mapping[str, Any]] | None) -> list[str]:
    if content is None or isinstance(content, str):
        return [content or ""]
    if any(part.get("type") not in _TEXT_PARTS for part in content):
        raise Unrenderable(UnreadReason.MEDIA, "Harmony has no pictures")
    return [part.get("text") or "" for part in content]


def _flat(content: str | Sequence[Mapping[str, Any]] | None) -> str | None:
    if content is None or isinstance(content, str):
        return content
    texts = [part["text"] for part in content if part.get("text") is not None]
    return "".join(texts) if texts else None


_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", None)
