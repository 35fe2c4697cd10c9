"""Reads responses that all OpenAI-compatible engines share, and builds bodies for `/tokenize`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

TOKENIZE_PATH = "/tokenize"
T = TypeVar("T")


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Choice(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None


class _Generated(msgspec.Struct):
    prompt_token_ids: list[int] | None = None
    choices: list[_Choice] = []
    usage: _Usage | None = None


def decode(response: bytes, kind: type[T]) -> T | None:
    """A JSON response as `kind`; None where it is something else."""
    try:
        return msgspec.json.decode(response, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def known_size(size: int | None) -> int | None:
    """A positive size; None for the 0 or -1 of an engine that does not report it."""
    return size if size is not None and size > 0 else None


def parse_tokens(response: bytes) -> list[int] | None:
    """Token ids from a response of `/tokenize`."""
    found = decode(response, _Tokens)
    return found.tokens if found else None


def prompt_token_ids(response: bytes) -> list[int] | None:
    """The prompt's tokens from a chat or completion response; None where it has none."""
    found = decode(response, _Generated)
    if found is None:
        return None
    return found.prompt_token_ids or next((c.prompt_token_ids for c in found.choices if c.prompt_token_ids), None)


def prompt_token_count(response: bytes) -> int | None:
    """Prompt tokens in the usage of a response."""
    found = decode(response, _Generated)
    return found.usage.prompt_tokens if found and found.usage else None


def tokenize_body(model: str, prompt: Mapping[str, Any], chat_fields: frozenset[str]) -> dict[str, Any] | None:
    """A body for `/tokenize` with `prompt` or `messages`. None for a prompt of tokens, and for a chat with other fields
    than `chat_fields`: they might change the tokens. `tool_choice` does not by default."""
    given = {name: value for name, value in prompt.items() if value is not None and name != "tool_choice"}
    if "messages" in given:
        return {"model": model, **given} if given.keys() <= chat_fields else None
    return {"model": model, **given} if isinstance(given.get("prompt"), str) else None
