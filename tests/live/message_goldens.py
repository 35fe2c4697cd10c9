"""Records the tokens that vLLM's renderer gives to bodies of other APIs than chat, for `tests/parity`.

The bodies come from hypothesis with a fixed seed. Only a digest of the tokens is kept; `test_message_tokens.py`, which
asks the renderer itself, shows where tokens differ.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from hypothesis import HealthCheck, Phase, given, seed, settings
from xxhash import xxh3_64_hexdigest

from router.types import Endpoint
from tests.live import message_bodies, response_bodies
from tests.live.engines import HOME, EngineProcess, start_renderer
from tests.live.message_bodies import Body

STRICT = Path(__file__).with_name("strict.jinja")
RENDERERS = {"tiny-qwen3": (), "tiny-llama": (), "strict": ("--chat-template", str(STRICT))}
"""Flags by the name of a recording. `strict` is tiny-llama with a template that merges late system messages."""
FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
RECORDED_BODIES = 250
BODIES = {Endpoint.MESSAGES: message_bodies.BODIES, Endpoint.RESPONSES: response_bodies.BODIES}
_ALL_CHECKS = list(HealthCheck)


def renderer(name: str, port: int) -> EngineProcess:
    """A running renderer of one recording."""
    model = "tiny-llama" if name == "strict" else name
    return start_renderer(f"render-{name}", port, HOME / "model" / model, (*FLAGS, *RENDERERS[name]))


def is_rendered_alike(name: str, body: Body) -> bool:
    """Whether the renderer makes the same prompt as the endpoint. It takes disabled thinking for `none` everywhere; the
    endpoint takes `low` with the strict template."""
    return name != "strict" or (body.get("thinking") or {}).get("type") != "disabled"


def rendered(client: httpx.Client, endpoint: Endpoint, body: Body) -> list[int] | None:
    """The tokens; None if the engine refuses the body."""
    answer = client.post(f"{endpoint}/render", json={"model": "tiny", **body})
    return answer.json()["token_ids"] if answer.status_code == 200 else None


def each_body(endpoint: Endpoint, run: Callable[[Body], None], bodies: int, number: int = 0) -> None:
    """Call `run` with as many different bodies, always the same for one `number`."""

    @seed(number)
    @settings(
        max_examples=bodies, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=_ALL_CHECKS
    )
    @given(BODIES[endpoint])
    def each(body: Body) -> None:
        run(body)

    each()


def digest(tokens: Sequence[int]) -> str:
    """A hash of all tokens, in order."""
    return xxh3_64_hexdigest(array("I", tokens).tobytes())


def record(client: httpx.Client, name: str, endpoint: Endpoint) -> list[dict[str, Any]]:
    """{body, tokens: their number, digest} of each body that the engine accepts."""
    lines: list[dict[str, Any]] = []

    def keep(body: Body) -> None:
        tokens = rendered(client, endpoint, body) if is_rendered_alike(name, body) else None
        if tokens is not None:
            lines.append({"body": body, "tokens": len(tokens), "digest": digest(tokens)})

    each_body(endpoint, keep, RECORDED_BODIES)
    return lines
