"""The next turn's prefill pod finds in a real store the answers that a decode pod has saved, as the router predicts."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from tests.live.engines import BLOCK_TOKENS, EngineProcess, started_together
from tests.live.pairs import MODEL, PATIENCE_S, mooncake_store, split_config, start_half
from tests.live.router_process import publisher, router
from tests.redis_process import redis_process

pytestmark = [pytest.mark.live, pytest.mark.net]

SESSIONS, TURNS = 30, 3
QUESTION_TOKENS, ANSWER_TOKENS = 70, 75
PUBLISHED_S = 3.0
"""In which the store's keys are listed again, and the index is read."""
VOCABULARY = range(1000, 100_000)


@dataclass(frozen=True, slots=True)
class Split:
    """A prefill pod, a decode pod, and the router before them."""

    decode: EngineProcess
    url: str
    admin_url: str


@contextmanager
def split(folder: Path, *, saves_answers: bool) -> Iterator[Split]:
    with ExitStack() as stack:
        store_url, *halves = stack.enter_context(mooncake_store(folder, saves_answers=saves_answers))
        starts = [partial(start_half, f"next-turn-{number}", half) for number, half in enumerate(halves)]
        prefill, decode = stack.enter_context(started_together(starts))
        redis = stack.enter_context(redis_process())
        store = {
            "kind": "mooncake",
            "url": store_url,
            "model": "tiny",
            "key_prefix": MODEL.name,
            "poll_interval_s": 0.5,
        }
        config = {
            **split_config("shared_store", [prefill.url], [decode.url], failures_to_eject=1000),
            "index": {"redis": {"url": redis.url}},
            "publish": {"heartbeat_s": 0.5, "stores": [store]},
        }
        stack.enter_context(publisher(folder, config))
        urls = stack.enter_context(router(folder, config))
        yield Split(decode, urls.public, urls.admin)


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: list[int]
    predicted: int
    reported: int
    prefill_pod: str | None


def ask(url: str, prompt: list[int], **more: Any) -> Answer:
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json={**asked, "return_token_ids": True, **more}, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    body, headers = answer.json(), answer.headers
    return Answer(
        body["choices"][0]["token_ids"],
        int(headers.get("x-warmroute-cached-tokens", 0)),
        body["usage"]["prompt_tokens_details"]["cached_tokens"],
        headers.get("x-warmroute-prefill-pod"),
    )


def said_of_answers(admin_url: str) -> tuple[bool, str]:
    """Whether the decode pod keeps answers, once that is known, and what is missing."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        pods = {one["role"]: one for one in httpx.get(f"{admin_url}/admin/pods").raise_for_status().json()}
        if pods["decode"]["keeps_answers"] is not None:
            return pods["decode"]["keeps_answers"], pods["decode"]["answers"]
        time.sleep(0.5)
    raise AssertionError("the router has not found out whether the decode pod keeps answers")


def test_the_next_turn_finds_the_saved_answer_as_predicted(tmp_path: Path) -> None:
    """Thirty sessions take turns. The ids are those of the decode pod alone, which a salt keeps from all caches."""
    random = Random(1)
    with split(tmp_path, saves_answers=True) as pair:
        assert said_of_answers(pair.admin_url) == (True, "")
        prompts = [random.sample(VOCABULARY, 2 * QUESTION_TOKENS) for _ in range(SESSIONS)]
        known_tokens = 0
        for _ in range(TURNS):
            answers = [ask(pair.url, prompt) for prompt in prompts]
            found = [(answer.predicted, answer.reported) for answer in answers]
            print(known_tokens, found)
            assert all(answer.prefill_pod for answer in answers)
            assert found == [(known_tokens, known_tokens)] * SESSIONS
            alone = [ask(pair.decode.url, prompt, cache_salt=uuid.uuid4().hex) for prompt in prompts]
            assert [one.tokens for one in answers] == [one.tokens for one in alone]
            known_tokens = (len(prompts[0]) + ANSWER_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS
            prompts = [
                [*prompt, *answer.tokens, *random.sample(VOCABULARY, QUESTION_TOKENS)]
                for prompt, answer in zip(prompts, answers, strict=True)
            ]
            time.sleep(PUBLISHED_S)


def test_a_store_without_answers_is_named(tmp_path: Path) -> None:
    with split(tmp_path, saves_answers=False) as pair:
        keeps, answers = said_of_answers(pair.admin_url)
    assert not keeps and "save_decode_cache: true" in answers
