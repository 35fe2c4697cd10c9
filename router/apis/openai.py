"""OpenAI's chats, completions and embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from router.apis.api import Api, Body, PromptKind, long_text, text_part
from router.apis.body_types import CHANGING_FIELDS, TEXT_FIELDS, ChatBody, CompletionBody, prompt_fields_of


def tools_probes(model: str, nonce: str, block_tokens: int | None) -> Iterator[Sequence[Body]]:
    """A group of probes of chats with tools: an agent's turn, then without a system message."""
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"place": "Köln"}'}}
    parameters = {"type": "object", "properties": {"place": {"type": "string"}}}
    turns = [
        {"role": "system", "content": f"{nonce} You are a probe."},
        {"role": "user", "content": [text_part(f"{nonce}\n{long_text(block_tokens)}"), text_part("Look.")]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "21.5 C"},
    ]
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    fields = {"model": model, "max_tokens": 1, "temperature": 0, "tools": [tool]}
    yield [{**fields, "messages": turns}, {**fields, "messages": turns[1:]}]


ASKED_USAGE = b'"stream_options":{"include_usage":true}'
"""What a pod is asked for in streams whose client has sent no `stream_options`."""
CHAT = Api(
    path="/v1/chat/completions",
    prompt=PromptKind.CHAT,
    body=ChatBody,
    prompt_fields=(*prompt_fields_of(ChatBody), "truncate_prompt_tokens"),
    raw_fields=frozenset({"messages"}),
    items="messages",
    shows_pictures=True,
    operation="chat",
    probes=tools_probes,
)
COMPLETIONS = Api(
    path="/v1/completions",
    prompt=PromptKind.COMPLETION,
    body=CompletionBody,
    prompt_fields=(*prompt_fields_of(CompletionBody), "truncate_prompt_tokens"),
    raw_fields=frozenset({"prompt", "prompt_embeds"}),
    takes_uuids=False,
    operation="text_completion",
)
EMBEDDINGS = Api(
    path="/v1/embeddings",
    prompt=PromptKind.TEXTS,
    prompt_fields=(*TEXT_FIELDS, *CHANGING_FIELDS),
    raw_fields=frozenset(TEXT_FIELDS),
    generates=False,
    operation="embeddings",
)
OTHER = Api(
    path="other",
    prompt=PromptKind.TEXTS,
    prompt_fields=TEXT_FIELDS,
    raw_fields=frozenset(TEXT_FIELDS),
    may_name_no_model=True,
)
