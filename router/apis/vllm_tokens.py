"""vLLM's requests about tokens."""

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
