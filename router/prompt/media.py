"""Finds the exact text in front of the first picture, sound or video of a chat whose tokens are unknown.

Engines replace each of these by tokens of their own, at a place that the template or the model's class decides. The
text in front of the first place does not depend on that. It is found by rendering the chat twice: with each part as
templates receive it, and with a marker instead. Both texts are equal up to the first place. Where the engine's tokens
for a picture are known (`pictures/`), the exact text goes on to the next one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from router.errors import MalformedRequest
from router.prompt.conversation import ChatMessage, ContentFormat, MediaPart
from router.prompt.pictures.picture_reader import PLACEHOLDER, Picture, key_of, url_of

MARKER = "\uf8fd\uf8fc"
"""Starts no placeholder. In a client's text it ends the exact text early."""
KINDS: Mapping[str, str] = {
    **dict.fromkeys(("image_url", "input_image", "image_pil", "image_embeds"), "image"),
    **dict.fromkeys(("audio_url", "input_audio", "audio_embeds"), "audio"),
    **dict.fromkeys(("video_url", "video_embeds"), "video"),
}
"""What templates receive as the type of a part, by the type, or the field of a part without one, in a request."""


_WORDS = (b"image", b"audio", b"video", b"\\u")
"""One of these is in the JSON of any such part. `\\u` may hide one."""


TOKENS = 1024
"""Assumed for each picture, sound or video whose tokens are unknown: a picture of 1280 x 720 pixels has 1,196 in
Qwen2-VL, 576 in LLaVA 1.5."""
MAX_KEYS = 32
"""Pictures, sounds and videos of one prompt that count for its price: the last ones, which are cached least often."""


class MediaText(msgspec.Struct, frozen=True, gc=False):
    """The text of a chat with one placeholder for each picture. `exact`: characters in front of the first one whose
    tokens are unknown."""

    text: str
    exact: int
    count: int
    keys: tuple[int, ...]
    """URLs of the last ones whose tokens are unknown, as numbers."""
    pictures: tuple[Picture, ...] = ()


def kind_of(part: Any) -> str | None:
    """`image`, `audio` or `video`; None for a part that is something else. As in vLLM, the type of a part with a `uuid`
    does not matter."""
    if not isinstance(part, dict):
        return None
    kind = part.get("type")
    if kind is None or part.get("uuid") is not None:
        found = next((KINDS[name] for name in part if name in KINDS), None)
        if found or kind is None:
            return found
    return KINDS.get(kind) if isinstance(kind, str) else None


def may_have_media(body: bytes) -> bool:
    """Whether an undecoded body may have a picture, sound or video."""
    return any(word in body for word in _WORDS)


def media_parts(messages: Any) -> list[dict[str, Any]]:
    """The parts of a decoded chat that are pictures, sounds and videos."""
    listed = messages if isinstance(messages, list) else []
    return [part for message in listed if isinstance(message, dict) for part in _parts(message) if kind_of(part)]


def with_media_parts(messages: Any, content_format: ContentFormat) -> Any:
    """The chat with its media as `MediaPart`. Where contents are strings, a marker is put in front of the text of each
    message that has some: engines put placeholders there, or further back."""
    if not isinstance(messages, list):
        return messages
    return [_with_media_parts(message, content_format) for message in messages]


def _with_media_parts(message: Any, content_format: ContentFormat) -> Any:
    parts = _parts(message) if isinstance(message, dict) else ()
    if not any(map(kind_of, parts)):
        return message
    if content_format == "openai":
        content = [MediaPart(type=kind) if (kind := kind_of(part)) else part for part in parts]
    else:
        content = [MARKER, *(part for part in parts if not kind_of(part))]
    return {**message, "content": content}


def _parts(message: Mapping[str, Any]) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else ()


def text_with_pictures(
    parts: Sequence[Mapping[str, Any]],
    conversation: list[ChatMessage],
    render: Callable[[list[ChatMessage]], str],
    pictures: tuple[Picture, ...] = (),
) -> MediaText:
    """The text of a conversation with `MediaPart`, or with markers in strings, for these parts of the request.
    `pictures`: the first of them, as far as their tokens are known, each one `PLACEHOLDER` in the text. Raises what
    `render` raises, and `MalformedRequest` if a picture reaches no template."""
    text = render(conversation)
    unknown = parts[len(pictures) :]
    keys = tuple([key_of(url) for part in unknown[-MAX_KEYS:] if (url := url_of(part))])
    exact = _exact_characters(text, conversation, render, len(pictures), len(parts))
    if pictures and text.count(PLACEHOLDER, 0, exact) != len(pictures):  # the client's text has some, too
        pictures, exact = (), text.index(PLACEHOLDER)
    return MediaText(text.replace(MARKER, ""), exact, len(parts), keys, pictures)


def _exact_characters(
    text: str, conversation: list[ChatMessage], render: Callable[[list[ChatMessage]], str], known: int, count: int
) -> int:
    """Characters in front of the first picture behind `known` ones."""
    if known == count:
        return len(text)
    numbers = iter(range(count))
    marked = render([_marked(message, known, numbers) for message in conversation])
    if MARKER not in marked:
        raise MalformedRequest("the chat template leaves out a part that is not text", param="messages")
    exact = marked.index(MARKER)
    if not text.startswith(marked[:exact]):
        exact = bisect_left(range(exact), True, key=lambda at: text[: at + 1] != marked[: at + 1])
    return exact


def _marked(message: ChatMessage, known: int, numbers: Iterator[int]) -> ChatMessage:
    content = message["content"]
    if not isinstance(content, list):
        return message
    mark = {"type": "text", "text": MARKER}
    parts = [mark if isinstance(part, MediaPart) and next(numbers) >= known else part for part in content]
    return {**message, "content": parts}
