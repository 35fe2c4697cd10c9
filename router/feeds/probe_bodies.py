"""The bodies that the parity self-test sends to a pod."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from router.apis.api import WORDS, long_text, text_part
from router.types import Endpoint

_SMALL = "iVBORw0KGgoAAAANSUhEUgAAAAIAAAACCAIAAAD91JpzAAAAC0lEQVR42mNgQAYAAA4AATo1BFYAAAAASUVORK5CYII="
"""A PNG of 2 x 2 pixels, which models enlarge."""
_SCREENSHOT = (
    "iVBORw0KGgoAAAANSUhEUgAABQAAAALQAQAAAADnBuD7AAAAh0lEQVR42u3BMQEAAADCoPVPbQlPoAAAAAAAAAAAAAAAAAAAAAAA"
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
    "AAAAAAAAAAAAAAAAAAAAAAAAAAB4GsTfAAGc95RKAAAAAElFTkSuQmCC"
)
"""A PNG of 1280 x 720 pixels, black and white, which engines convert to RGB."""

Probe: TypeAlias = tuple[Endpoint, dict[str, Any]]
MakeGroups: TypeAlias = Callable[[str, str, int | None], Iterable[Sequence[Probe]]]
"""As `MakeProbes`, with the endpoint of each."""


def probes(model: str, nonce: str, block_tokens: int | None) -> Iterator[Probe]:
    """Probe requests, the most thorough first: a chat with several roles, a chat without a system message (some
    templates refuse one), a completion. `nonce` prevents cache hits. Each word is at least one token."""
    text = long_text(block_tokens)
    system = {"role": "system", "content": f"{nonce} You are a probe. {WORDS}"}
    turns = [
        {"role": "user", "content": f"{nonce}\n{text}"},
        {"role": "assistant", "content": f"Well, {WORDS}"},
        {"role": "user", "content": "And?"},
    ]
    common = {"model": model, "max_tokens": 1, "temperature": 0}
    yield Endpoint.CHAT, {**common, "messages": [system, *turns]}
    yield Endpoint.CHAT, {**common, "messages": turns}
    yield Endpoint.COMPLETIONS, {**common, "prompt": f"{nonce} {text}"}


def embeddings_probe(model: str, nonce: str, block_tokens: int | None) -> Probe:
    """A text to embed. Only KV events show its tokens."""
    return Endpoint.EMBEDDINGS, {"model": model, "input": f"{nonce} {long_text(block_tokens)}"}


def picture_probes(model: str, nonce: str, block_tokens: int | None) -> Iterator[Sequence[Probe]]:
    """With a picture: its number of tokens shows the limits of its size, and the blocks behind it its identifier."""
    for encoded in (_SMALL, _SCREENSHOT):
        shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
        content = [text_part(f"{nonce} Look:"), shown, text_part(long_text(block_tokens))]
        messages = [{"role": "user", "content": content}]
        yield [(Endpoint.CHAT, {"model": model, "max_tokens": 1, "temperature": 0, "messages": messages})]


def conversion_probes(endpoint: Endpoint) -> MakeGroups:
    make = endpoint.api.probes
    assert make is not None
    return lambda *about: ([(endpoint, body) for body in group] for group in make(*about))
