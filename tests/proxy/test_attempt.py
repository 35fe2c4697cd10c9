"""Attempts: which candidate is tried next, and what a failure or a success changes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from router.decision import Direct
from router.errors import NoReadyPod, UpstreamBroken
from router.hashing import hash_array, token_array
from router.policy.calibration import SAME_STEP_S, PrefillObservation
from router.policy.spec import Policy
from router.types import Generation, Pod, PromptPrefix
from tests.policy.scenes import POLICIES
from tests.proxy.pods import Asked, Town, town
from tests.proxy.test_kv_transfer import ANSWERING, answer, resetting, saying, streaming

pytestmark = [pytest.mark.net, pytest.mark.anyio]

BUSY = saying({"error": {"message": "busy"}}, 503)
ERROR = saying({"error": {"message": "bug"}}, 500)
PROMPT = PromptPrefix(Generation(model="m"), token_array(range(50)), hash_array([1, 2, 3]))


async def computing(asked: Asked) -> None:
    """Streams after a measurable prefill."""
    await asyncio.sleep(2 * SAME_STEP_S)
    await streaming(asked)


def plans(pods: Town) -> list[Direct]:
    return [Direct(pods.pod(name)) for name in pods.made]


def retries(pods: Town, reason: str, refused: str = "") -> float:
    return pods.counted(f"warmroute_retries{refused}_total", reason=reason)


async def test_a_busy_pod_is_replaced_by_the_next_candidate() -> None:
    """Its 503 is a failure that the client does not see."""
    async with town(a=BUSY, b=ANSWERING) as pods:
        context = pods.context(*plans(pods))
        client = await pods.serve(context)
        assert (client.status, client.header(b"x-warmroute-pod")) == (200, b"b")
        assert (context.tries, [failure.pod for failure in context.failures], pods.failures("a")) == (2, ["a"], 1)
        assert retries(pods, "UpstreamBroken") == 1


async def test_the_last_candidates_503_is_relayed() -> None:
    """It is a failure of the pod as well."""
    async with town(a=BUSY) as pods:
        assert (await pods.serve(pods.context(*plans(pods)))).status == 503
        assert pods.failures("a") == 1
        assert pods.counted("warmroute_pod_requests_total", pod="a", result="server_error") == 1


async def test_another_server_error_is_relayed_without_a_retry() -> None:
    """Another pod would most likely respond the same."""
    async with town(a=ERROR, b=ANSWERING) as pods:
        assert (await pods.serve(pods.context(*plans(pods)))).status == 500
        assert (pods.failures("a"), len(pods.made["b"].asked)) == (1, 0)


async def test_a_client_error_is_no_failure_of_the_pod() -> None:
    """It clears earlier failures: the pod responds."""
    async with town(a=resetting) as pods:
        with pytest.raises(UpstreamBroken):
            await pods.serve(pods.context(*plans(pods)))
        assert pods.failures("a") == 1
        pods.made["a"].behaviour = saying({"error": {}}, 400)
        assert (await pods.serve(pods.context(*plans(pods)))).status == 400
        assert pods.failures("a") == 0
        assert pods.counted("warmroute_pod_requests_total", pod="a", result="ok") == 1


async def test_without_budget_a_503_is_relayed_and_a_failure_is_raised() -> None:
    """After the retries that a quiet router may make; each refusal is counted."""
    async with town(a=BUSY, b=ANSWERING) as pods:
        statuses = [(await pods.serve(pods.context(*plans(pods)))).status for _ in range(28)]
        # 20 retries, and one for every fifth request
        assert statuses == [200] * 25 + [503] * 3
        assert retries(pods, "status", "_refused") == 3
        pods.made["a"].behaviour = resetting
        with pytest.raises(UpstreamBroken):
            await pods.serve(pods.context(*plans(pods)))
        assert retries(pods, "UpstreamBroken", "_refused") == 1


@pytest.mark.parametrize(("attempts", "served"), [(None, 3), (1, 1), (2, 2), (5, 4)])
async def test_a_policy_may_limit_the_attempts(attempts: int | None, served: int) -> None:
    """Otherwise one more than the configured retries, which are two here."""
    async with town(a=resetting, b=resetting, c=resetting, d=resetting) as pods:
        context = pods.context(*plans(pods))
        policy: Policy = replace(POLICIES["cost_aware"], attempts=attempts)
        context.policy = policy
        with pytest.raises(UpstreamBroken):
            await pods.serve(context)
        assert context.tries == served
        assert [len(pod.asked) for pod in pods.made.values()] == [1] * served + [0] * (4 - served)


async def test_a_request_without_a_usable_candidate_is_refused() -> None:
    """No pod has failed."""
    async with town(a=ANSWERING) as pods:
        plan = Direct(replace(pods.pod("a"), serves_alone=False))
        with pytest.raises(NoReadyPod, match="Pod a serves no request on its own"):
            await pods.serve(pods.context(plan))
        assert not pods.made["a"].asked


async def test_a_streamed_prompt_calibrates_its_pod() -> None:
    """By the tokens that were computed, which differ from the expected ones where the engine had more cached."""
    async with town(a=computing) as pods:
        seen: list[tuple[str, PrefillObservation]] = []
        observe = pods.calibrator.observe_prefill

        def record(pod: Pod, observation: PrefillObservation, now_s: float) -> None:
            seen.append((pod.id, observation))
            observe(pod, observation, now_s)

        pods.calibrator.observe_prefill = record  # type: ignore[method-assign, assignment]
        await pods.serve(pods.context(*plans(pods), prompt=PROMPT, stream=True))
        ((pod, observation),) = seen
        # 7 cached tokens are expected, 48 of 50 are reported
        assert (pod, observation.tokens) == ("a", 2)
        await pods.serve(pods.context(*plans(pods), prompt=PROMPT, stream=True))
        assert len(seen) == 1, "the next one follows too soon"


async def test_a_prompt_that_was_not_read_calibrates_nothing() -> None:
    """Its length is only estimated."""
    async with town(a=streaming) as pods:
        pods.calibrator.observe_prefill = NotImplemented  # type: ignore[method-assign]
        assert (await pods.serve(pods.context(*plans(pods), stream=True))).status == 200


async def test_the_prompt_is_dropped_after_the_first_token_of_a_stream() -> None:
    """Not before, because a retry needs it."""
    bodies: list[int] = []

    async def respond(asked: Asked) -> None:
        bodies.append(len(context.request.body))
        await streaming(asked)

    async with town(a=respond) as pods:
        context = pods.context(*plans(pods), prompt=PROMPT, stream=True)
        await pods.serve(context)
        assert bodies[0] > 0
        assert (context.request.body, context.prompt_tokens) == (b"", 50)


async def test_route_headers_name_pod_policy_and_cached_tokens() -> None:
    """And the request id."""
    async with town(a=saying(answer())) as pods:
        client = await pods.serve(pods.context(*plans(pods)))
        names = (b"x-request-id", b"x-warmroute-pod", b"x-warmroute-policy", b"x-warmroute-cached-tokens")
        assert [client.header(name) for name in names] == [b"req-1", b"a", b"scripted", b"7"]
        assert client.header(b"x-warmroute-prefill-pod") == b""


async def test_a_pod_without_events_keeps_the_predicted_blocks_that_fit_its_capacity() -> None:
    """Its reported capacity, or else the configured one of 1,000 tokens."""
    async with town(a=ANSWERING) as pods:
        pods.publishes_events = False
        capacities: list[int | None] = []
        pods.store.on_record = lambda pod, blocks, ttl_s, capacity_blocks: capacities.append(capacity_blocks)
        for capacity_tokens in (None, 64):
            plan = Direct(replace(pods.pod("a"), capacity_tokens=capacity_tokens))
            await pods.serve(pods.context(plan, prompt=PROMPT))
        assert capacities == [62, 4]
