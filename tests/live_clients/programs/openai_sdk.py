"""OpenAI's SDK for Python: runs the steps of standard input against a base URL, and prints what each call returns."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from typing import Any

import openai

FILE = ("note.wav", b"RIFF" + bytes(range(256)) * 64, "audio/wav")


def call(client: openai.OpenAI, api: str, body: dict[str, Any]) -> Any:
    if api == "speech":
        with client.audio.speech.with_streaming_response.create(**body) as answer:
            return hashlib.sha256(b"".join(answer.iter_bytes())).hexdigest()
    if api == "file":
        return client.files.create(file=FILE, **body)
    if api == "transcription":
        return client.audio.transcriptions.create(file=FILE, **body)
    calls: dict[str, Any] = {
        "chat": client.chat.completions,
        "completions": client.completions,
        "responses": client.responses,
        "embeddings": client.embeddings,
    }
    return calls[api].create(**body)


def shown(returned: Any) -> Any:
    if isinstance(returned, openai.Stream):
        return [shown(one) for one in returned]
    return returned.model_dump() if hasattr(returned, "model_dump") else returned


def main() -> None:
    with openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=120) as client:
        for step in json.load(sys.stdin):
            try:
                result = shown(call(client, step["api"], step["body"]))
            except openai.APIError as error:
                result = {"error": type(error).__name__, "message": str(error)}
            print(json.dumps(result, default=lambda raw: base64.b64encode(raw).decode()))


main()
