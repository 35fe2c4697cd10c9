"""Requests with pictures for live tests and recordings: pictures of all formats and modes, in three APIs."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from io import BytesIO
from typing import Any

import httpx
from PIL import Image

Body = dict[str, Any]
TEXT = "The harbour master writes down every boat that comes in, its name and its cargo. "
KINDS = (
    *(("PNG", "RGB"), ("PNG", "RGBA"), ("PNG", "L"), ("PNG", "P"), ("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK")),
    *(("WEBP", "RGB"), ("WEBP", "RGBA"), ("GIF", "P")),
)
SIZES = ((84, 56), (2, 2), (200, 77), (333, 640))


def base64_picture(number: int, width: int = 448, height: int = 448, kind: str = "PNG", mode: str = "RGB") -> str:
    """A file with a picture of one colour per `number`."""
    file = BytesIO()
    picture = Image.new("RGB", (width, height), (number % 251, 3 * number % 251, 100))
    picture.putpixel((0, 0), (number // 251, 0, 0))
    if mode == "RGBA":
        picture.putalpha(number % 200 + 1)
    picture.convert(mode).save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


def image_url(encoded: str) -> Body:
    """As a part of a chat."""
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}


def text(words: str) -> Body:
    """A part with text."""
    return {"type": "text", "text": words}


def opening(*pictures: str) -> list[Body]:
    """A chat whose first question has pictures."""
    asked = [text("Look: "), *map(image_url, pictures), text(f"What is it? {TEXT * 2}")]
    return [{"role": "system", "content": TEXT * 3}, {"role": "user", "content": asked}]


def picture_steps(client: httpx.Client) -> Iterator[Body]:
    """Each request as a line: path, body, tokens if the API returns them, their number, cached tokens."""
    for number, (kind, mode) in enumerate(KINDS):
        chat = opening(base64_picture(number, *SIZES[number % len(SIZES)], kind, mode))
        yield _asked(client, "/v1/chat/completions", {"messages": chat})
    grown = opening(base64_picture(50), base64_picture(51, 84, 56))
    for turn in range(3):
        for _ in range(2):
            yield _asked(client, "/v1/chat/completions", {"messages": list(grown)})
        said = {"role": "assistant", "content": f"A boat. {TEXT}"}
        grown += [said, {"role": "user", "content": [image_url(base64_picture(60 + turn, 140, 90)), text(TEXT)]}]
    other = opening(base64_picture(52), base64_picture(51, 84, 56))
    for _ in range(2):
        yield _asked(client, "/v1/chat/completions", {"messages": other})
    for uuid in ("first", "first", "second"):
        named = opening(base64_picture(50))
        named[1]["content"][1]["uuid"] = uuid
        yield _asked(client, "/v1/chat/completions", {"messages": named})
    yield _asked(client, "/v1/chat/completions", {"messages": opening(base64_picture(50)), "cache_salt": "tenant a"})
    source = {"type": "base64", "media_type": "image/png", "data": base64_picture(70)}
    asked = {"role": "user", "content": [{"type": "image", "source": source}, text(TEXT)]}
    used = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": 1}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "image", "source": source}]}
    seen = [asked, {"role": "assistant", "content": [used]}, {"role": "user", "content": [result, text(TEXT)]}]
    for messages in ([asked], [asked], seen, seen):
        yield _asked(client, "/v1/messages", {"system": TEXT, "messages": messages})
    shown = [
        {"type": "input_image", "image_url": f"data:;base64,{base64_picture(71)}"},
        {"type": "input_text", "text": TEXT},
    ]
    for _ in range(2):
        yield _asked(client, "/v1/responses", {"input": [{"role": "user", "content": shown}], "store": False})


def _asked(client: httpx.Client, path: str, fields: Body) -> Body:
    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {"model": "tiny", most: 16 if path == "/v1/responses" else 1, "temperature": 0, **fields}
    sent = {**body, "return_token_ids": True} if path == "/v1/chat/completions" else body
    result = client.post(path, json=sent).raise_for_status().json()
    usage = result["usage"]
    if path == "/v1/messages":
        cached = usage.get("cache_read_input_tokens") or 0
        prompt = usage["input_tokens"] + cached + (usage.get("cache_creation_input_tokens") or 0)
    else:
        kind = "input" if path == "/v1/responses" else "prompt"
        cached, prompt = usage[f"{kind}_tokens_details"]["cached_tokens"], usage[f"{kind}_tokens"]
    line = {"kind": "request", "path": path, "body": body, "prompt_tokens": prompt, "cached_tokens": cached}
    tokens = result.get("prompt_token_ids")
    return line | ({"token_ids": tokens} if tokens else {})
