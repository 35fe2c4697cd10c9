"""vLLM's requests about tokens, and those that are forwarded unread: decisions, and SGLang's /generate."""

from __future__ import annotations

from router.apis.api import Api, PromptKind
from router.apis.body_types import TEXT_FIELDS, TokenizeBody

TOKENIZE = Api(
    path="/tokenize",
    prompt=PromptKind.TOKENIZED,
    body=TokenizeBody,
    prompt_fields=tuple(name for name in TokenizeBody.__annotations__ if name != "model"),
    raw_fields=frozenset({"messages", "prompt"}),
    items="messages",
    generates=False,
    is_about_tokens=True,
)
DETOKENIZE = Api(
    path="/detokenize",
    prompt=PromptKind.NONE,
    raw_fields=frozenset(TEXT_FIELDS),
    may_name_no_model=True,
    generates=False,
    takes_uuids=False,
)
DECISIONS, SYSTEMONE = (
    Api(path=path, prompt=PromptKind.NONE, may_name_no_model=True) for path in ("/v1/decisions", "/v1/systemone")
)
"""Typed questions about a text. vLLM refuses any field that it does not know; only a salt may be added."""
GENERATE = Api(
    path="/generate",
    prompt=PromptKind.NONE,
    may_name_no_model=True,
    steering_fields=frozenset({"extra_key", "kv_hints"}),
)
