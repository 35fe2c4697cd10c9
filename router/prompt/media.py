"""Finds the exact text in front of the first picture, sound or video of a chat.

Engines replace each of these by tokens of their own, at a place that the template or the model's class decides. The
text in front of the first place does not depend on that. It is found by rendering the chat twice: with each part as
templates receive it, and with a marker instead. Both texts are equal up to the first place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from router.errors import MalformedRequest
from router.prompt.content_format import ContentFormat
from router.prompt.conversation import MediaPart, Message

MARKER = "\uf8fd\uf8fc"
"""Starts no placeholder. In a client's text it ends the exact text early."""
_KINDS: Mapping[str, str] = {
    **dict.fromkeys(("image_url", "input_image", "image_pil", "image_embeds"), "image"),
    **dict.fromkeys(("audio_url", "input_audio", "audio_embeds"), "audio"),
    **dict.fromkeys(("video_url", "video_embeds"), "video"),
}
"""What templates receive as the type of a part, by the type, or the field of a part without one, in a request."""


_WORDS = (b"image", b"audio", b"video", b"\\u")
"""One of these is in the JSON of any such part. `\\u` may hide one."""


TOKENS = 1024
"""Assumed for each picture, sound or video. A picture of 1280 x 720 pixels has 1,196 in Qwen2-VL, 576 in LLaVA 1.5."""


class MediaText(msgspec.Struct, frozen=True, gc=False):
    """The text of a chat with one placeholder for each picture. `exact`: characters in front of the first one."""

    text: str
    exact: int
    media_tokens: int
    """Of all pictures, estimated."""


def kind_of(part: Any) -> str | None:
    """`image`, `audio` or `video`; None for a part that is something else."""
    if not isinstance(part, dict):
        return None
    kind = part.get("type")
    if kind is None:
        return next((_KINDS[name] for name in part if name in _KINDS), None)
    return _KINDS.get(kind) if isinstance(kind, str) else None


def may_have_media(body: bytes) -> bool:
    """Whether an undecoded body may have a picture, sound or video."""
    return any(word in body for word in _WORDS)


def media_count(messages: Any) -> int:
    """Number of pictures, sounds and videos in a decoded chat."""
    listed = messages if isinstance(messages, list) else []
    return sum(bool(kind_of(part)) for message in listed if isinstance(message, dict) for part in _parts(message))


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


def text_in_front(conversation: list[Message], render: Callable[[list[Message]], str], count: int) -> MediaText:
    """The text of a conversation with `MediaPart`, or with markers in strings, for `count` pictures. Raises what
    `render` raises, and `MalformedRequest` if a picture reaches no template."""
    text = render(conversation)
    marked = render([_marked(message) for message in conversation])
    if MARKER not in marked:
        raise MalformedRequest("the chat template leaves out a part that is not text", param="messages")
    exact = marked.index(MARKER)
    if not text.startswith(marked[:exact]):
        exact = bisect_left(range(exact), True, key=lambda at: text[: at + 1] != marked[: at + 1])
    return MediaText(text.replace(MARKER, ""), exact, count * TOKENS)


def _marked(message: Message) -> Message:
    content = message["content"]
    if not isinstance(content, list):
        return message
    parts = [{"type": "text", "text": MARKER} if isinstance(part, MediaPart) else part for part in content]
    return {**message, "content": parts}
