"""What the router predicts for models with sliding windows and Mamba layers is what real vLLM takes from its cache: in
every request of sessions that share starts, are cut, salted and evicted."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import openai
import pytest

from tests.live.engines import HOME, start_vllm
from tests.live.hybrid_models import make_model
from tests.live.live_fleet import SESSIONS_DEADLINE_S, Answer, LiveFleet, answer_of, live_fleet

pytestmark = [pytest.mark.live, pytest.mark.net, pytest.mark.anyio]

SESSIONS, TURNS = 20, 10
TOKENIZERS = {"gptoss": HOME / "model" / "tiny-gptoss"}
"""Others: Qwen3's."""
VOCABULARY = 150_000
FLAGS = ("--load-format", "dummy")
BLOCKS = {"gemma3": 900, "gptoss": 400, "qwen3next": 160, "mistral": 400}
"""GPU blocks of a pod, too few for all sessions. Qwen3-Next has blocks of 256 tokens."""
NGRAM = "-ngram"
"""With n-gram speculation, which drops no block."""
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'


@pytest.fixture(scope="module", params=[*BLOCKS, "gemma3" + NGRAM])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveFleet]:
    name = request.param.removesuffix(NGRAM)
    folder = tmp_path_factory.mktemp(name)
    model = make_model(name, TOKENIZERS.get(name, HOME / "tokenizer" / "qwen3"), folder / "model")
    flags = (*FLAGS, "--num-gpu-blocks-override", str(BLOCKS[name]))
    drafts = ("--speculative-config", DRAFTS) if request.param.endswith(NGRAM) else ()
    block: dict[str, Any] = {"block_tokens": None} if name == "qwen3next" else {}
    start = partial(start_vllm, model_dir=model, extra_args=(*flags, *drafts), **block)
    with live_fleet(f"hybrid-{request.param}", folder, model, start) as running:
        yield running


class TokenSession:
    """A conversation of token ids that begins with one of three system prompts. Some turns are sent again, cut, or
    aligned to blocks; one session in five has a salt."""

    def __init__(self, number: int) -> None:
        self._random = random.Random(number)
        start = random.Random(number % 3)
        self.tokens = [start.randrange(VOCABULARY) for _ in range(320 + 32 * (number % 3))]
        self.salt = f"salt-{number}" if number % 5 == 4 else ""

    def asked(self) -> list[int]:
        kind = self._random.random()
        if kind < 0.1:
            return self.tokens
        if kind < 0.2:
            return self.tokens[: self._random.randrange(64, len(self.tokens) + 1)]
        self.tokens += [self._random.randrange(VOCABULARY) for _ in range(self._random.randrange(20, 260))]
        if kind < 0.35:
            self.tokens = self.tokens[: len(self.tokens) // 32 * 32]
        return self.tokens


HITS = {
    "gemma3": "full + window 128, checkpoints",
    "gptoss": "full + window 128, checkpoints",
    "qwen3next": "full + state, checkpoints",
    "mistral": "window 128, upper bound",
}
"""What the test of a pod's hits shows."""


def fleet_name(request: pytest.FixtureRequest) -> str:
    name: str = request.node.callspec.params["fleet"].removesuffix(NGRAM)
    return name


async def test_the_pods_show_by_which_rule_they_hit(fleet: LiveFleet, request: pytest.FixtureRequest) -> None:
    expected, found = HITS[fleet_name(request)], set[str]()
    async with httpx.AsyncClient() as client:
        for _ in range(120):
            pods = (await client.get(f"{fleet.admin_url}/admin/pods")).json()
            if (found := {pod["hits"] for pod in pods}) == {expected}:
                break
            await asyncio.sleep(0.5)
    assert found == {expected}


def known(tokens: list[int]) -> list[int]:
    """The leading tokens that the tokenizer has: random weights also choose those that pad the vocabulary."""
    return list(itertools.takewhile(lambda token: token < VOCABULARY, tokens))


async def ask(client: openai.AsyncOpenAI, prompt: list[int], salt: str, max_tokens: int) -> Answer:
    more: dict[str, Any] = {"return_token_ids": True, **({"cache_salt": salt} if salt else {})}
    raw = await client.completions.with_raw_response.create(
        model="tiny", prompt=prompt, max_tokens=max_tokens, temperature=0, extra_body=more
    )
    return answer_of(raw.headers, raw.parse().model_dump(exclude_none=True))


async def test_every_prediction_is_what_the_engine_reports(fleet: LiveFleet, request: pytest.FixtureRequest) -> None:
    sessions = [TokenSession(number) for number in range(SESSIONS)]
    answers: list[Answer] = []
    async with fleet.openai_sdk() as client, asyncio.timeout(SESSIONS_DEADLINE_S):
        for turn in range(TURNS):
            for number, session in enumerate(sessions):
                prompt = session.asked()
                answer = await ask(client, prompt, session.salt, 1 + 13 * ((turn + number) % 4))
                answers.append(answer)
                if prompt is session.tokens:
                    session.tokens = prompt + known(answer.body["choices"][0]["token_ids"])
    predicted, reported = (sum(getattr(one, name) for one in answers) for name in ("predicted", "reported"))
    print(
        f"{len(answers)} requests, {sum(one.prompt for one in answers)} tokens: {predicted} predicted, {reported} hit"
    )
    if predicted != reported:
        print(
            *[
                (n, one.prompt, one.predicted, one.reported)
                for n, one in enumerate(answers)
                if one.predicted != one.reported
            ]
        )
    wrong = [(n, one.predicted, one.reported) for n, one in enumerate(answers) if one.predicted != one.reported]
    if "mistral" in fleet_name(request):
        assert all(expected >= hit for _, expected, hit in wrong), "windows alone: an upper bound"
    else:
        assert wrong == []
    assert reported > 0.2 * sum(one.prompt for one in answers)
