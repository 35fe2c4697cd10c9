"""Records what SGLang's own Python does with requests and prompts (`sglang_reference.py`), for `tests/parity`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from router.types import Endpoint
from tests.live.cases import CHATS
from tests.live.engines import HOME
from tests.live.message_bodies import Body
from tests.live.message_goldens import digest, each_body

MODEL = HOME / "model" / "tiny-llama"
RECORDED_BODIES = 400


def bodies() -> list[tuple[Endpoint, Body]]:
    """The chats that are recorded of vLLM, too, and random bodies of `/v1/messages`."""
    found = [(Endpoint.CHAT, body) for body in CHATS.values()]
    each_body(Endpoint.MESSAGES, lambda body: found.append((Endpoint.MESSAGES, body)), RECORDED_BODIES)
    return found


def tokens_of(asked: Iterable[tuple[Endpoint, Body]], model: Path = MODEL) -> Iterator[list[int] | None]:
    """The tokens of each prompt; None where SGLang refuses the body."""
    given = "".join(json.dumps({"endpoint": endpoint.value, "body": body}) + "\n" for endpoint, body in asked)
    yield from _output("tokens", str(model), given=given)[1:]


def token_lines() -> Iterator[dict[str, Any]]:
    """{endpoint, body, tokens: their number, digest} of each body that SGLang accepts."""
    asked = bodies()
    for (endpoint, body), tokens in zip(asked, tokens_of(asked), strict=True):
        if tokens is not None:
            yield {"endpoint": endpoint.value, "body": body, "tokens": len(tokens), "digest": digest(tokens)}


def event_lines() -> Sequence[dict[str, Any]]:
    """Each step of a life of SGLang's radix cache, with the frames of its publisher."""
    return _output("events")


def _output(*arguments: str, given: str = "") -> list[Any]:
    script = Path(__file__).with_name("sglang_reference.py")
    command = [str(HOME / "sglang" / "bin" / "python"), str(script), *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=True, timeout=600)
    return [json.loads(line) for line in done.stdout.splitlines() if line[:1] in "[{n"]
