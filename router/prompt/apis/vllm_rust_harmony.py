"""What the Rust front end of vLLM 0.33 makes of a chat with gpt-oss (docs/engines.md#the-front-end-in-rust)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from router.prompt.apis.conversion import not_converted
from router.prompt.apis.rust_messages import read_messages, read_tools, refuse
from router.prompt.conversation import ChatMessage
from router.prompt.harmony import ANSWER, CONSTRAIN, EFFORTS, Harmony, HarmonyMessage, SeparateTexts


class RustHarmony:
    """gpt-oss's format, as the Rust front end renders it."""

    def __init__(self, harmony: Harmony) -> None:
        self._harmony = harmony

    def render(self, body: Mapping[str, Any]) -> SeparateTexts:
        """The prompt of a chat whose messages are decoded. Raises `Unrenderable`."""
        messages, asked = read_messages(body["messages"], keeps_parts=False), body.get("chat_template_kwargs") or {}
        effort = body.get("reasoning_effort") or asked.get("reasoning_effort")
        if (
            effort not in (None, *EFFORTS)
            or asked.get("enable_thinking") is False
            or body.get("continue_final_message")
        ):
            refuse("an effort, or a continued message, in Harmony")
        all_tools = read_tools(body, messages)
        tools, instructions = all_tools[: len(body.get("tools") or ())], ""
        if messages[0]["role"] in ("system", "developer"):
            first = messages.pop(0)
            instructions, tools = first["content"], tools + first.get("tools", [])
        preamble = self._developer(instructions, tools)
        begins = ANSWER if body.get("add_generation_prompt") is not False else ""
        return self._harmony.assembled(effort, preamble, bool(all_tools), self._harmony_messages(messages), begins)

    def _developer(self, instructions: str, tools: Sequence[Mapping[str, Any]]) -> str:
        sections = [f"# Instructions\n\n{self._harmony.plain(instructions)}"] if instructions else []
        try:
            return self._harmony.sections(sections, [tool["function"] for tool in tools], "_: any")
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise not_converted(f"tools that Harmony does not know: {error}") from error

    def _harmony_messages(self, messages: Sequence[ChatMessage]) -> Iterator[HarmonyMessage]:
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        names = {call["id"]: call["function"]["name"] for call in calls}
        for message in messages:
            role, text = message["role"], message["content"]
            if role == "assistant":
                yield from _turn(text, message.get("reasoning"), message.get("tool_calls", ()))
            elif role == "tool":
                if message["tool_call_id"] not in names:
                    refuse("the result of an unknown call")
                yield f"functions.{names[message['tool_call_id']]}<|channel|>commentary to=assistant", [text], "<|end|>"
            elif role == "user":
                yield role, [text], "<|end|>"
            elif role in ("system", "developer"):
                yield "developer", [self._developer(text, message.get("tools", ()))], "<|end|>"
            else:
                raise not_converted(f"the role {role!r:.40} in Harmony")


def _turn(text: str, reasoning: str | None, calls: Sequence[Mapping[str, Any]]) -> Iterator[HarmonyMessage]:
    """The assistant's messages of one turn."""
    if calls and text:
        yield "assistant<|channel|>commentary", [text], "<|end|>"
    if reasoning:
        yield "assistant<|channel|>analysis", [reasoning], "<|end|>"
    for call in calls:
        head = f"assistant<|channel|>commentary to=functions.{call['function']['name']} {CONSTRAIN}"
        yield head, [call["function"]["arguments"]], "<|call|>"
    if text and not calls:
        yield "assistant<|channel|>final", [text], "<|end|>"
