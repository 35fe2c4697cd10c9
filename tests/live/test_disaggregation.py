"""Real vLLM pods hand KV over in each dialect, and failures cost no request."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.live.engines import BLOCK_TOKENS
from tests.live.pairs import CONNECTORS, PATIENCE_S, Moment, Pair, running
from tests.live.tiers import CHUNK_TOKENS

pytestmark = [pytest.mark.live, pytest.mark.net]

LINES = 12
CHUNKS = {"lmcache": CHUNK_TOKENS, "mooncake-store": BLOCK_TOKENS}
"""Stores keep whole units of a prompt; the rest is computed again."""
MOST_LATE = 4
"""A store may be written after the decode pod's lookup; then that pod computes too. This is the maximum in a row."""
_COUNTED = re.compile(r'vllm:prompt_tokens_by_source_total\{.*source="(\w+)".*\} (\S+)')
_RESULT = re.compile(r'warmroute_handoffs_total\{.*result="(\w+)"\} (\S+)')


@pytest.fixture(scope="module", params=CONNECTORS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """One pair per connector, one after the other; each takes a minute on two cores."""
    with running(request.param, tmp_path_factory.mktemp(request.param)) as pair:
        yield pair


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client gets, and how long it waited."""

    text: str
    prefill_pod: str | None
    prompt_tokens: int
    cached_tokens: int
    predicted_tokens: int
    took_s: float


def ask(url: str, path: str, body: dict[str, Any], *, stream: bool = False) -> Answer:
    """Send one request."""
    asked = {"model": "tiny", "max_tokens": 12, "temperature": 0, **body}
    if stream:
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
    began_s = time.monotonic()
    answer = httpx.post(f"{url}{path}", json=asked, timeout=PATIENCE_S)
    took_s = time.monotonic() - began_s
    assert answer.status_code == 200, answer.text
    parts = _events(answer.text) if stream else [answer.json()]
    usage = parts[-1]["usage"]
    return Answer(
        "".join(_said(choice) for part in parts for choice in part["choices"]),
        answer.headers.get("x-warmroute-prefill-pod"),
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        int(answer.headers.get("x-warmroute-cached-tokens", 0)),
        took_s,
    )


def _events(stream: str) -> list[dict[str, Any]]:
    *events, end = [line.removeprefix("data: ") for line in stream.split("\n\n") if line]
    assert end == "[DONE]"
    return [json.loads(event) for event in events]


def _said(choice: dict[str, Any]) -> str:
    said = choice.get("message") or choice.get("delta") or choice
    return said.get("content") or said.get("text") or ""


def alone(pair: Pair, path: str, body: dict[str, Any]) -> str:
    """The decode pod's response without handoff: a salt bypasses every cache."""
    return ask(pair.decode.url, path, {**body, "cache_salt": uuid.uuid4().hex}).text


def counted(url: str, what: re.Pattern[str]) -> Counter[str]:
    """Counters of a pod or of the router, by a label."""
    text = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text
    return Counter({found[1]: round(float(found[2])) for line in text.splitlines() if (found := what.match(line))})


def prompt(path: str, name: str) -> dict[str, Any]:
    """Prompts with different names share no line."""
    text = " ".join(
        f"{name}: boat {line} comes in, and the harbour master writes down its cargo." for line in range(LINES)
    )
    return {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"], ids=["chat", "completion"])
def test_a_split_request_has_the_response_of_one_pod(pair: Pair, path: str, stream: bool) -> None:
    """The decode pod counts the prompt as transferred; the client sees only the tokens that were cached before."""
    chunk = CHUNKS.get(pair.connector, 1)
    for number in range(MOST_LATE + 1 if pair.connector in CHUNKS else 1):
        body = prompt(path, f"{pair.connector} {path} {stream} {number}")
        before = counted(pair.decode.url, _COUNTED)
        first = ask(pair.url, path, body, stream=stream)
        came = counted(pair.decode.url, _COUNTED) - before
        again = ask(pair.url, path, body, stream=stream)
        print(first, came, again)
        assert first.text == again.text == alone(pair, path, body)
        assert first.prefill_pod == again.prefill_pod == pair.relay.url.removeprefix("http://")
        assert came["local_cache_hit"] == first.cached_tokens == first.predicted_tokens == 0
        assert again.cached_tokens >= again.predicted_tokens == (first.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        whole = came["external_kv_transfer"] >= (first.prompt_tokens - 1) // chunk * chunk
        if whole:
            break
    assert whole, came


def test_a_prefill_pod_that_is_killed_costs_no_request(pair: Pair) -> None:
    """Killed between its response and the decode leg, or while both legs run; then it stays dead and is soon ejected,
    because its probes fail too."""
    together = pair.connector == "mooncake"
    pair.relay.kills_at = Moment.AT_PREFILL_LEG if together else Moment.BETWEEN_LEGS
    before = counted(pair.admin_url, _RESULT)
    for name in ("killed", "dead"):
        for stream in (True, False):
            body = prompt("/v1/completions", f"{pair.connector} {name} {stream}")
            answer = ask(pair.url, "/v1/completions", body, stream=stream)
            print(name, answer, counted(pair.admin_url, _RESULT) - before)
            assert answer.text == alone(pair, "/v1/completions", body)
            assert answer.cached_tokens == 0
    results = counted(pair.admin_url, _RESULT) - before
    assert results["prefill_failed"] + results["decode_failed"] >= 1
