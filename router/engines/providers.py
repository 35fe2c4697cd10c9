"""What providers of hosted models read: the APIs that they serve, and the fields and headers that they know.

Everything else of a request stays here: a provider refuses fields that it does not know, and headers of a client may
name what is only for pods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from router.engines.adapter import EngineAdapter
from router.errors import DECODE_ERRORS
from router.types import Endpoint, InferenceRequest

_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_SAMPLING = frozenset({"frequency_penalty", "logit_bias", "n", "presence_penalty", "seed", "stop", "temperature"})
_SAMPLING |= {"max_tokens", "model", "stream", "stream_options", "top_p", "user"}
_WITH_USAGE = msgspec.Raw(b'{"include_usage":true}')


@dataclass(frozen=True, slots=True)
class ProviderApi:
    """The API of a kind of provider. `fields`: those that it knows, by endpoint. `headers`: those of a client that it
    gets, besides the content type. `key_header`: with `%b` in place of the key. `defaults`: headers that it needs."""

    fields: Mapping[Endpoint, frozenset[str]]
    headers: frozenset[bytes]
    key_header: tuple[bytes, bytes]
    defaults: Mapping[bytes, bytes]
    tools: tuple[str, ...]
    """How the types of tools begin that clients run. Those that a provider runs cost more than their tokens."""

    def headers_with(self, key: str, given: Mapping[bytes, bytes] | None = None) -> list[tuple[bytes, bytes]]:
        """What authenticates a request with this key, and what is known of the headers of a client."""
        known = {name: value for name, value in (given or {}).items() if name in self.headers}
        name, form = self.key_header
        return [*{**self.defaults, **known}.items(), (name, form % key.encode())]


PROVIDER_APIS: Mapping[str, ProviderApi] = {
    "openai": ProviderApi(
        {
            Endpoint.CHAT: _SAMPLING
            | {"audio", "function_call", "functions", "logprobs", "max_completion_tokens", "messages", "metadata"}
            | {"modalities", "parallel_tool_calls", "prediction", "prompt_cache_key", "reasoning_effort"}
            | {"response_format", "safety_identifier", "tool_choice", "tools", "top_logprobs", "verbosity"},
            Endpoint.COMPLETIONS: _SAMPLING | {"best_of", "echo", "logprobs", "prompt", "suffix"},
            Endpoint.EMBEDDINGS: frozenset({"dimensions", "encoding_format", "input", "model", "user"}),
            Endpoint.RESPONSES: frozenset({"include", "input", "instructions", "max_output_tokens", "max_tool_calls"})
            | {"metadata", "model", "parallel_tool_calls", "prompt_cache_key", "reasoning", "safety_identifier"}
            | {"store", "stream", "temperature", "text", "tool_choice", "tools", "top_logprobs", "top_p", "truncation"}
            | {"user"},
        },
        frozenset({b"openai-beta"}),
        (b"authorization", b"Bearer %b"),
        {},
        ("function", "custom", "local_shell"),
    ),
    "anthropic": ProviderApi(
        {
            Endpoint.MESSAGES: frozenset({"max_tokens", "messages", "metadata", "model", "stop_sequences", "stream"})
            | {"output_config", "system", "temperature", "thinking", "tool_choice", "tools", "top_k", "top_p"},
        },
        frozenset({b"anthropic-beta", b"anthropic-version"}),
        (b"x-api-key", b"%b"),
        {b"anthropic-version": b"2023-06-01"},
        ("custom", "bash_", "text_editor_", "computer_", "memory_"),
    ),
}


class HostedEngine(EngineAdapter):
    """A provider in the place of a pod. Nothing is known of what is behind it, and it lacks nothing."""

    lack_answers = ()


class _Tool(msgspec.Struct):
    type: str = ""


_TOOLS = msgspec.json.Decoder(list[msgspec.Raw])
_TOOL = msgspec.json.Decoder(_Tool)


def _run_by_clients(tools: msgspec.Raw, api: ProviderApi) -> list[msgspec.Raw]:
    try:
        kinds = [(_TOOL.decode(tool).type, tool) for tool in _TOOLS.decode(tools)]
    except DECODE_ERRORS:
        return []
    return [tool for kind, tool in kinds if not kind or kind.startswith(api.tools)]


def provider_body(request: InferenceRequest, api: ProviderApi, model: str) -> bytes:
    """The body for a provider: with the fields that it knows, the tools that clients run, and its name of the model. A
    stream is asked for its usage, and no response is kept there: nobody would find it again."""
    known = api.fields[request.endpoint]
    fields: dict[str, Any] = {name: value for name, value in _OBJECT.decode(request.body).items() if name in known}
    fields.pop("stream_options", None)
    if "stream" in fields:
        fields["stream"] = request.stream
        if request.stream and "stream_options" in known:
            fields["stream_options"] = _WITH_USAGE
    if "store" in known:
        fields["store"] = False
    if "tools" in fields:
        fields["tools"] = _run_by_clients(fields["tools"], api)
        if not fields["tools"]:
            del fields["tools"]
            fields.pop("tool_choice", None)
    return msgspec.json.encode({**fields, "model": model})
