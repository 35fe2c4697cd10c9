"""Can this request be computed on one pod and answered by another?

KV that is handed over is one prompt's, and is read once. This file never looks at a pod or a dialect.
"""

from __future__ import annotations

from typing import Any

import msgspec

from router.types import Endpoint


class _SplitFields(msgspec.Struct):
    """Read as leniently as the engines read it."""

    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    echo: bool | None = None
    prompt_logprobs: int | None = None
    prompt: Any = None


_SPLIT_FIELDS = msgspec.json.Decoder(_SplitFields, strict=False)


def why_not(endpoint: Endpoint, body: bytes) -> str:
    """A sentence for people; empty where nothing speaks against it."""
    if endpoint not in (Endpoint.CHAT, Endpoint.COMPLETIONS):
        return "Only chats and completions decode anything."
    try:
        asked = _SPLIT_FIELDS.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "The body cannot be read."
    if max(asked.n or 1, asked.best_of or 1) > 1 or asked.use_beam_search:
        return "Several choices would each need the KV, which can be read only once."
    if _several(asked.prompt):
        return "Several prompts in one request would each need a handoff."
    if asked.echo or asked.prompt_logprobs is not None:
        return "What is asked about the prompt is known only where it was computed."
    return ""


def _several(prompt: Any) -> bool:
    """A list of ints is one prompt; a list of texts or of lists is as many as it has."""
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
