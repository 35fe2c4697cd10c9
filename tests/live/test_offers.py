"""A real vLLM that offers the KV of its answers: nobody gets an offer, and its memory is free again at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.live.pairs import PATIENCE_S, Fleet, nixl_fleet

pytestmark = [pytest.mark.live, pytest.mark.net]

WORDS = " ".join(f"boat {line} comes in, and the harbour master writes down its cargo." for line in range(12))
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": WORDS}]}),
    "completion": ("/v1/completions", {"prompt": WORDS}),
    "responses": ("/v1/responses", {"input": WORDS}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": WORDS}]}),
}
FREE_WITHIN_S = 1.0


@pytest.fixture(scope="module", params=["pairs", "vllm33"], ids=["0.32", "0.33"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with nixl_fleet(tmp_path_factory.mktemp("offers"), 1, request.param, bidirectional_kv_xfer=True) as fleet:
        yield fleet


def used(fleet: Fleet) -> float:
    """The share of the decode pod's KV that is in use."""
    text = httpx.get(f"{fleet.decodes[0].url}/metrics", timeout=PATIENCE_S).text
    return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if "kv_cache_usage_perc{" in line)


def ask(fleet: Fleet, name: str, kind: str, *, stream: bool) -> httpx.Response:
    path, body = BODIES[kind]
    fields = {"model": "tiny", "temperature": 0, "stream": stream}
    fields["max_output_tokens" if kind == "responses" else "max_tokens"] = 12
    answer = httpx.post(f"{fleet.url}{path}", json={**body, **fields, "user": name}, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
@pytest.mark.parametrize("kind", BODIES)
def test_no_answer_has_a_field_of_an_offer(fleet: Fleet, kind: str, stream: bool) -> None:
    """Chats and completions are split; the others have no offers."""
    answer = ask(fleet, "nobody", kind, stream=stream)
    is_split = answer.headers.get("x-warmroute-prefill-pod") is not None
    assert is_split == (kind in ("chat", "completion"))
    assert "remote_" not in answer.text
    assert not is_split or "kv_transfer_params" not in answer.text


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
def test_the_memory_of_an_answer_is_free_within_a_second(fleet: Fleet, kind: str, stream: bool) -> None:
    """The prefill pod releases it. Streams of 0.32 name no offer: their memory waits for eight minutes."""
    is_named = not stream or "vllm33" in str(fleet.decodes[0].process.args)
    before = used(fleet)
    ask(fleet, "first", kind, stream=stream)  # the first transfer from a decode pod takes seconds
    time.sleep(10.0)
    ask(fleet, "second", kind, stream=stream)
    began_s = time.monotonic()
    while used(fleet) > before and time.monotonic() < began_s + 5 * FREE_WITHIN_S:
        time.sleep(0.05)
    took_s = time.monotonic() - began_s
    print(f"{kind}, stream {stream}: {before:.4f} in use before, {used(fleet):.4f} after {took_s:.2f} s")
    assert took_s < FREE_WITHIN_S if is_named else used(fleet) > before
