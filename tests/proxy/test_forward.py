"""A request through all phases, and what is counted, logged and recorded of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from router.admission.quotas import Quota
from router.admission.tenant import Tenant
from router.errors import NoReadyPod, RouterError, UpstreamBroken
from router.fleet.fleet import PodEvent
from router.hashing import hash_array, token_array
from router.phases import PHASES
from router.request.attempt_rules import SAMPLED_STREAMS
from router.types import PRIOR_OUTPUT_TOKENS, Generation, PrefixMatch, PrefixTrust, PromptPrefix
from tests.kit.deadlines import DEADLINE_S
from tests.kit.scripted_pods import Asked, Client, Town, town
from tests.proxy.test_kv_transfer import ANSWERING, TOKEN, answer, resetting, saying, silent, streaming

pytestmark = [pytest.mark.virtual, pytest.mark.anyio]

BLOCKS = 3
PROMPT = PromptPrefix(Generation(model="m"), token_array(range(50)), hash_array(range(1, BLOCKS + 1)))
"""50 tokens in three full blocks, as the pods of these tests count them."""
MODEL = {"model": "m"}


def ended(pods: Town, result: str, model: str = "m") -> float:
    return pods.counted("warmroute_requests_total", endpoint="/v1/chat/completions", model=model, result=result)


def tokens(pods: Town) -> tuple[float, float, float]:
    """Prompt tokens, and of these the predicted and the reported cached ones."""
    names = ("prompt_tokens", "cached_tokens_captured", "cached_tokens_delivered")
    return tuple(pods.counted(f"warmroute_{name}_total", **MODEL) for name in names)  # type: ignore[return-value]


def read_prompts(pods: Town) -> None:
    """Prompts are read, and pods trusted to have the predicted blocks."""
    pods.read_prompt = PROMPT
    for pod in pods.made:
        pods.fleet.trust(pod, PrefixTrust.TRUSTED, "tested")


def in_flight(pods: Town) -> float:
    return pods.counted("warmroute_in_flight_requests")


async def test_predicted_and_reported_cached_tokens_are_counted() -> None:
    """The first request predicts nothing; the second predicts the blocks of the first on the pod that served it."""
    async with town(a=ANSWERING) as pods:
        read_prompts(pods)
        await pods.forward(pods.context())
        assert tokens(pods) == (50, 0, 48)
        await pods.forward(pods.context())
        assert tokens(pods) == (100, 48, 96)
        error = "warmroute_cached_tokens_error"
        assert (pods.counted(f"{error}_sum", **MODEL), pods.counted(f"{error}_count", **MODEL)) == (48, 2)


async def test_an_answer_is_expected_to_be_as_long_as_finished_ones() -> None:
    """In prices and quotas. A refused request has no answer, and one with a limit no longer one."""
    async with town(a=saying({"error": {}, "usage": {"completion_tokens": 9}}, 404)) as pods:
        await pods.forward(pods.context())
        assert pods.output_lengths.expected_tokens(pods.context().request) == PRIOR_OUTPUT_TOKENS
        pods.made["a"].behaviour = saying(answer("h" * 4000, usage={"prompt_tokens": 9, "completion_tokens": 4000}))
        for _ in range(50):
            await pods.forward(pods.context())
        expected = pods.output_lengths.expected_tokens(pods.context().request)
        assert expected > 3000
        context = pods.context()
        await pods.forward(context)
        assert context.recorded is not None and context.recorded.scene.expected_output_tokens == expected


async def test_a_quota_expects_answers_as_long_as_those_of_its_tenant() -> None:
    """Long answers of another one do not use it up."""
    limits = (Quota(output_tokens_per_minute=10**9),)
    async with town(a=saying(answer("h" * 4000, usage={"prompt_tokens": 9, "completion_tokens": 4000}))) as pods:

        async def charged(tenant: str) -> int:
            context = pods.context()
            context.tenant = Tenant(name=tenant, quotas=limits)
            await pods.forward(context)
            assert context.hold is not None
            return context.hold.output_tokens

        for _ in range(50):
            await charged("verbose")
        pods.made["a"].behaviour = saying(answer(usage={"prompt_tokens": 9, "completion_tokens": 4}))
        for _ in range(100):
            await charged("brief")
        assert await charged("brief") < 500
        assert await charged("verbose") > 3000


async def test_the_time_between_tokens_is_sampled() -> None:
    """In one of `SAMPLED_STREAMS` streams."""
    client = Client()

    async def in_two_pieces(asked: Asked) -> None:
        await asked.begin()
        await asked.event(TOKEN)
        await asyncio.wait_for(client.wrote.wait(), DEADLINE_S)
        await asked.event("[DONE]")
        await asked.end()

    async with town(a=streaming) as pods:
        for _ in range(SAMPLED_STREAMS - 1):
            await pods.forward(pods.context(stream=True))
        assert pods.counted("warmroute_inter_token_seconds_count") == 0
        pods.made["a"].behaviour = in_two_pieces
        await pods.forward(pods.context(stream=True), client)
        assert pods.counted("warmroute_inter_token_seconds_count") == 1


async def test_a_request_that_fails_predicts_nothing() -> None:
    """Neither does one whose prompt could not be read."""
    async with town(a=saying({"error": {}}, 404)) as pods:
        read_prompts(pods)
        assert (await pods.forward(pods.context())).status == 404
        assert (ended(pods, "pod_refused"), tokens(pods)) == (1, (0, 0, 0))
        pods.made["a"].behaviour, pods.read_prompt = ANSWERING, None
        await pods.forward(pods.context())
        assert (ended(pods, "ok"), tokens(pods)) == (1, (0, 0, 0))


async def test_a_served_request_is_counted_in_all_phases() -> None:
    """Each phase once; nothing stays in flight."""
    async with town(a=ANSWERING) as pods:
        await pods.forward(pods.context())
        assert (ended(pods, "ok"), in_flight(pods)) == (1, 0)
        phases = [pods.counted("warmroute_phase_seconds_count", phase=phase) for phase in PHASES]
        assert phases == [1] * len(PHASES)
        assert pods.counted("warmroute_request_duration_seconds_count", **MODEL) == 1
        assert pods.counted("warmroute_class_requests_total", **{"class": "one_off", "tenant": "", "result": "ok"}) == 1


async def test_only_a_streamed_response_has_a_time_to_first_token() -> None:
    """It is compared with the expected time where the prompt was read."""
    names = ("warmroute_time_to_first_token_seconds_count", "warmroute_time_to_first_token_predicted_seconds_count")
    async with town(a=ANSWERING) as pods:
        read_prompts(pods)
        await pods.forward(pods.context())
        assert [pods.counted(name, **MODEL) for name in names] == [0, 0]
        pods.made["a"].behaviour = streaming
        await pods.forward(pods.context(stream=True))
        assert [pods.counted(name, **MODEL) for name in names] == [1, 1]
        pods.read_prompt = None
        await pods.forward(pods.context(stream=True))
        assert [pods.counted(name, **MODEL) for name in names] == [2, 1]


async def test_late_first_tokens_are_held_against_the_pod() -> None:
    """By the breaker, with the client and the expected and the actual time."""
    async with town(a=streaming) as pods:
        seen: list[tuple[Any, ...]] = []
        pods.breaker.first_token = lambda *facts: seen.append(facts)  # type: ignore[method-assign]
        read_prompts(pods)
        context = pods.context(stream=True)
        await pods.forward(context)
        ((pod, client, expected_ms, actual_ms, _),) = seen
        assert context.first_token_s is not None
        assert (pod, client, actual_ms) == ("a", context.client, context.first_token_s * 1000)
        assert expected_ms > 0


async def test_a_request_is_logged_and_recorded() -> None:
    """One line, and the outcome of its decision."""
    async with town(a=streaming) as pods:
        await pods.forward(pods.context(stream=True))
        (line,) = map(json.loads, pods.log_lines)
        fields = ("event", "id", "model", "pod", "policy", "status", "result", "cached_tokens")
        expected = ["request", "req-1", "m", "a", "cost_aware", 200, "ok", 48]
        assert [line[field] for field in fields] == expected
        assert 0 < line["ttft_ms"] <= line["e2e_ms"] + 0.05
        _, found = pods.recent.find("req-1") or (None, None)
        assert found is not None
        assert found.result == "ok"
        assert found.ttft_ms == pytest.approx(line["ttft_ms"], abs=0.05)
        assert set(found.phases_s) == set(PHASES)


async def test_a_request_without_a_pod_is_counted_under_its_model() -> None:
    """Pods serve it, or did, so that clients cannot invent the name."""
    async with town(a=ANSWERING) as pods:
        pods.fleet.event("a", PodEvent.DRAIN)
        with pytest.raises(NoReadyPod):
            await pods.forward(pods.context())
        assert (ended(pods, "no_ready_pod"), in_flight(pods)) == (1, 0)
        (line,) = map(json.loads, pods.log_lines)
        assert "No pod that serves" in line["error"]
        assert (line["result"], "pod" in line, "status" in line, "policy" in line) == (
            "no_ready_pod",
            False,
            True,
            False,
        )


async def test_a_failure_is_counted_by_its_error() -> None:
    """After the last candidate."""
    async with town(a=resetting) as pods:
        with pytest.raises(UpstreamBroken):
            await pods.forward(pods.context())
        assert (ended(pods, "upstream_broken"), in_flight(pods)) == (1, 0)
        _, found = pods.recent.find("req-1") or (None, None)
        assert found is not None
        assert [(one.pod, one.error) for one in found.failures] == [("a", "upstream_broken")]


@pytest.mark.parametrize(("gone", "result"), [(True, "client_gone"), (False, "stopping")])
async def test_a_cancelled_request_is_counted_by_its_reason(gone: bool, result: str) -> None:
    """The client disconnected, or the router stops."""
    async with town(a=silent) as pods:
        client = Client()
        serving = asyncio.create_task(pods.forward(pods.context(), client))
        await pods.until(lambda: pods.made["a"].working)
        assert in_flight(pods) == 1
        client.disconnected = gone
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert (ended(pods, result), in_flight(pods)) == (1, 0)
        await pods.left_alone()


async def test_a_match_without_a_current_index_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """By model."""

    def match(prompt: PromptPrefix, now_s: float) -> PrefixMatch:
        return PrefixMatch(degraded=True)

    async with town(a=ANSWERING) as pods:
        monkeypatch.setattr(pods.store, "match", match)
        await pods.forward(pods.context())
        assert pods.counted("warmroute_degraded_matches_total", **MODEL) == 0
        read_prompts(pods)
        await pods.forward(pods.context())
        assert pods.counted("warmroute_degraded_matches_total", **MODEL) == 1


async def test_the_prompt_counts_as_cached_where_it_was_sent() -> None:
    """For pods without KV events with their own expiry and capacity."""
    async with town(a=ANSWERING) as pods:
        read_prompts(pods)
        client = await pods.forward(pods.context())
        assert client.header(b"x-warmroute-cached-tokens") == b"0"
        client = await pods.forward(pods.context())
        assert client.header(b"x-warmroute-cached-tokens") == b"%d" % (16 * BLOCKS)
        assert client.header(b"x-warmroute-policy") == b"cost_aware"


async def test_a_preview_is_the_next_decision_and_counts_nothing() -> None:
    """Nothing is sent or recorded."""
    async with town(a=ANSWERING, b=saying(answer("b", 48))) as pods:
        read_prompts(pods)
        request = pods.context().request
        previews = [await pods.preview(request) for _ in range(3)]
        assert not pods.made["a"].asked and not pods.made["b"].asked
        assert pods.recent.find("req-1") is None
        client = await pods.forward(pods.context())
        assert {preview.candidates[0].pod.id.encode() for preview in previews} == {client.header(b"x-warmroute-pod")}
        following = await pods.preview(request)
        assert following.candidates[0].pod.id.encode() == client.header(b"x-warmroute-pod")
        assert following.candidates[0].cached_tokens == 16 * BLOCKS


async def test_round_robin_alternates_between_pods() -> None:
    """Each request of a model has the next turn."""
    async with town(a=ANSWERING, b=ANSWERING) as pods:
        pods.policy = "round_robin"
        served = {(await pods.forward(pods.context())).header(b"x-warmroute-pod") for _ in range(4)}
        assert served == {b"a", b"b"}


async def test_errors_of_the_decision_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """And raised."""

    async def fail(request: object) -> PromptPrefix | None:
        raise RouterError("no")

    async with town(a=ANSWERING) as pods:
        monkeypatch.setattr(pods, "read", fail)
        with pytest.raises(RouterError):
            await pods.forward(pods.context())
        assert ended(pods, "internal_error") == 1


async def test_a_preview_shows_the_next_turn() -> None:
    """And does not use it up."""
    async with town(a=ANSWERING, b=ANSWERING, c=ANSWERING) as pods:
        pods.policy = "round_robin"
        for _ in range(4):
            preview = await pods.preview(pods.context().request)
            client = await pods.forward(pods.context())
            assert preview.candidates[0].pod.id.encode() == client.header(b"x-warmroute-pod")
