"""A pod for speech, transcriptions and files, which vLLM on a CPU does not serve.

It makes speech while it sends it, and streams a transcription as vLLM 0.32 does: usage only where the form asks for it.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from hashlib import sha256

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from loadtest.commands.child_processes import free_port
from tests.live_clients.scenario import MODEL

PIECES, PIECE_BYTES, PAUSE_S = 10, 4_800, 0.05
TYPES = {"pcm": "audio/pcm", "wav": "audio/wav", "mp3": "audio/mpeg"}
WORDS = ("one", " two", " three")


async def sent_form(request: Request) -> tuple[FormData, bytes, str | None]:
    """The form, and content and name of its file."""
    async with request.form() as form:
        file = form["file"]
        assert not isinstance(file, str)
        return form, await file.read(), file.filename


async def speech(request: Request) -> Response:
    asked = await request.json()

    async def pieces() -> AsyncIterator[bytes]:
        for number in range(PIECES):
            yield bytes((number + at) % 256 for at in range(PIECE_BYTES))
            await asyncio.sleep(PAUSE_S)

    return StreamingResponse(pieces(), media_type=TYPES[asked["response_format"]])


async def transcription(request: Request) -> Response:
    form, content, _ = await sent_form(request)
    digest = sha256(content).hexdigest()
    if form.get("stream") != "true":
        usage = {"type": "duration", "seconds": 1}
        return JSONResponse({"text": digest, "usage": usage})

    async def events() -> AsyncIterator[str]:
        head = {"id": "trsc-1", "object": "transcription.chunk", "created": 1, "model": MODEL}
        for word in (digest, *WORDS):
            yield f"data: {json.dumps({**head, 'choices': [{'delta': {'content': word}}]})}\n\n"
        if form.get("stream_include_usage") == "true":
            usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
            yield f"data: {json.dumps({**head, 'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


async def file(request: Request) -> Response:
    form, content, name = await sent_form(request)
    stored = {"id": "file-1", "object": "file", "bytes": len(content), "created_at": 1, "filename": name}
    return JSONResponse({**stored, "purpose": form["purpose"], "status": "processed"})


async def models(_: Request) -> Response:
    card = {"id": MODEL, "object": "model", "created": 1, "owned_by": "vllm", "root": MODEL, "parent": None}
    return JSONResponse({"object": "list", "data": [card]})


APP = Starlette(
    routes=[
        Route("/v1/audio/speech", speech, methods=["POST"]),
        Route("/v1/audio/transcriptions", transcription, methods=["POST"]),
        Route("/v1/files", file, methods=["POST"]),
        Route("/v1/models", models),
        Route("/version", lambda _: JSONResponse({"version": "0.32.0"})),
        Route("/health", lambda _: Response()),
        Route("/metrics", lambda _: Response("vllm:num_requests_running 0.0\n", media_type="text/plain")),
    ]
)


@contextmanager
def audio_pod() -> Iterator[str]:
    """Its URL. It runs in a thread of its own."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(APP, host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
