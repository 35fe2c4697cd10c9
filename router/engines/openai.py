"""Reads the answers that all OpenAI-compatible engines share, and builds bodies for `/tokenize`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

MODELS_PATH = "/v1/models"
T = TypeVar("T")


class _Meta(msgspec.Struct):
    n_ctx: int | None = None


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None
    max_model_len: int | None = None
    meta: _Meta | None = None

    @property
    def context_tokens(self) -> int | None:
        return known_size(self.max_model_len) or known_size(self.meta.n_ctx if self.meta else None)


class _Models(msgspec.Struct):
    data: list[_Card]


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


class ServedModels(msgspec.Struct, frozen=True):
    """Names that clients may send, and the longest context that all base models accept."""

    models: tuple[str, ...]
    adapters: tuple[str, ...]
    max_model_len_tokens: int | None


def decode(answer: bytes, kind: type[T]) -> T | None:
    """A JSON answer as `kind`; None where it is something else."""
    try:
        return msgspec.json.decode(answer, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def known_size(size: int | None) -> int | None:
    """A positive size; None for the 0 or -1 of an engine that does not report it."""
    return size if size is not None and size > 0 else None


def parse_models(answer: bytes) -> ServedModels | None:
    """The answer of `/v1/models`; None if it names no base model. An adapter is a card that has a parent."""
    listed = decode(answer, _Models)
    base = [card for card in listed.data if card.parent is None] if listed else []
    if listed is None or not base:
        return None
    return ServedModels(
        models=tuple(card.id for card in base),
        adapters=tuple(card.id for card in listed.data if card.parent is not None),
        max_model_len_tokens=min((card.context_tokens for card in base if card.context_tokens), default=None),
    )


def parse_tokens(answer: bytes) -> list[int] | None:
    """Token ids from an answer of `/tokenize`."""
    found = decode(answer, _Tokens)
    return found.tokens if found else None


def prompt_token_ids(answer: bytes) -> list[int] | None:
    """The prompt's tokens from a chat or completion answer; None where it has none."""
    found = decode(answer, _Generated)
    if found is None:
        return None
    return found.prompt_token_ids or next((c.prompt_token_ids for c in found.choices if c.prompt_token_ids), None)


def prompt_token_count(answer: bytes) -> int | None:
    """Prompt tokens in the answer's usage."""
    found = decode(answer, _Generated)
    return found.usage.prompt_tokens if found and found.usage else None


def tokenize_body(model: str, prompt: Mapping[str, Any], chat_fields: frozenset[str]) -> dict[str, Any] | None:
    """A body for `/tokenize` with `prompt` or `messages`. None for a prompt of tokens, and for a chat with other fields
    than `chat_fields`: they might change the tokens. `tool_choice` does not by default."""
    given = {name: value for name, value in prompt.items() if value is not None and name != "tool_choice"}
    if "messages" in given:
        return {"model": model, **given} if given.keys() <= chat_fields else None
    return {"model": model, **given} if isinstance(given.get("prompt"), str) else None
