"""Attempts: which candidate is tried next, and what a failure or a success changes."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from router.decision import Direct
from router.errors import ConnectFailed, NoReadyPod, UpstreamBroken, UpstreamError
from router.hashing import hash_array, token_array
from router.policy.prefill_clock import SAME_STEP_S, PrefillObservation
from router.policy.spec import Policy
from router.types import Generation, Pod, PodState, PromptPrefix
from tests.policy.scenes import POLICIES
from tests.proxy.pods import Asked, Behaviour, Client, Town, town
from tests.proxy.test_kv_transfer import ANSWERING, TOKEN, answer, resetting, saying, silent, streaming

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
        assert retries(pods, "upstream_broken") == 1


async def test_the_last_candidates_503_is_relayed() -> None:
    """No other pod shows whether the pod or the request is the cause."""
    async with town(a=BUSY) as pods:
        assert (await pods.serve(pods.context(*plans(pods)))).status == 503
        assert (pods.failures("a"), pods.doubts("a")) == (0, 1)
        assert pods.counted("warmroute_pod_requests_total", pod="a", result="pod_error") == 1


async def test_another_server_error_is_relayed_without_a_retry() -> None:
    """Another pod would most likely respond the same."""
    async with town(a=ERROR, b=ANSWERING) as pods:
        assert (await pods.serve(pods.context(*plans(pods)))).status == 500
        assert (pods.failures("a"), pods.doubts("a"), len(pods.made["b"].asked)) == (0, 1, 0)


@pytest.mark.parametrize("status", [400, 404, 413, 429, 501, 505])
async def test_a_refusal_is_no_failure_of_the_pod(status: int) -> None:
    """Nor does it clear earlier ones: a client could keep a broken pod in the fleet by sending nonsense."""
    async with town(a=resetting) as pods:
        with pytest.raises(UpstreamBroken):
            await pods.serve(pods.context(*plans(pods)))
        pods.made["a"].behaviour = saying({"error": {}}, status)
        assert (await pods.serve(pods.context(*plans(pods)))).status == status
        assert (pods.failures("a"), pods.doubts("a")) == (0, 1)
        pods.made["a"].behaviour = ANSWERING
        await pods.serve(pods.context(*plans(pods)))
        assert pods.doubts("a") == 0


REFUSED_BODY = saying({"error": {}}, 413)


@pytest.mark.parametrize("second", [resetting, silent, BUSY, ERROR, REFUSED_BODY])
async def test_a_request_that_no_pod_serves_is_in_doubt(second: Behaviour) -> None:
    """A body that one pod dies of and another one refuses may be the cause of both."""
    async with town(first_byte_s=0.2, a=resetting, b=second, c=ANSWERING) as pods:
        with contextlib.suppress(UpstreamError):
            await pods.serve(pods.context(*plans(pods)))
        doubts = 0 if second is REFUSED_BODY else 1
        assert [(pods.failures(pod), pods.doubts(pod)) for pod in "ab"] == [(0, 1), (0, doubts)]
        assert not pods.made["c"].asked


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_another_pod_serves_clears_all_doubt(stream: bool) -> None:
    """From the first token on, so that a broken pod is ejected while the streams of others last."""

    async def checking(asked: Asked) -> None:
        await asked.begin()
        await asked.event(TOKEN)
        await pods.until(lambda: pods.failures("a"))
        await asked.end()

    async with town(a=resetting, b=checking if stream else ANSWERING) as pods:
        await pods.serve(pods.context(*plans(pods), stream=stream))
        assert [(pods.failures(pod), pods.doubts(pod)) for pod in "ab"] == [(1, 0), (0, 0)]


async def test_a_client_that_leaves_before_the_second_pod_responds_leaves_doubt() -> None:
    """Otherwise impatient clients would keep a broken pod in the fleet."""
    async with town(a=resetting, b=silent) as pods:
        serving = asyncio.create_task(pods.serve(pods.context(*plans(pods))))
        await pods.until(lambda: pods.made["b"].working)
        serving.cancel()
        await asyncio.wait([serving])
        assert [(pods.failures(pod), pods.doubts(pod)) for pod in "ab"] == [(0, 1), (0, 0)]
        await pods.left_alone()


async def test_without_budget_a_503_is_relayed_and_a_failure_is_raised() -> None:
    """After the retries that a quiet router may make; each refusal is counted."""
    async with town(a=BUSY, b=ANSWERING) as pods:
        statuses = [(await pods.serve(pods.context(*plans(pods)))).status for _ in range(28)]
        # 20 retries, and one for every fifth request
        assert statuses == [200] * 25 + [503] * 3
        assert retries(pods, "upstream_broken", "_refused") == 3
        pods.made["a"].behaviour = resetting
        with pytest.raises(UpstreamBroken):
            await pods.serve(pods.context(*plans(pods)))
        assert retries(pods, "upstream_broken", "_refused") == 4


@contextlib.contextmanager
def no_free_file() -> Iterator[None]:
    """This process can open no file or socket."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("attempts", "tries"), [(None, 3), (1, 1), (2, 2), (5, 4)])
async def test_a_policy_may_limit_the_attempts(attempts: int | None, tries: int) -> None:
    """Otherwise one more than the configured retries, which are two here."""
    async with town(a=resetting, b=resetting, c=resetting, d=resetting) as pods:
        closed = [Direct(replace(plan.pod, url="http://127.0.0.1:1")) for plan in plans(pods)]
        context = pods.context(*closed)
        policy: Policy = replace(POLICIES["cost_aware"], attempts=attempts)
        context.policy = policy
        with pytest.raises(ConnectFailed):
            await pods.serve(context)
        assert context.tries == tries


async def test_a_router_without_a_free_file_ejects_no_pod() -> None:
    """It is not the pods' fault that no connection can be opened. Once it can, requests are served."""
    async with town(a=ANSWERING, b=ANSWERING) as pods:
        with no_free_file():
            for _ in range(5):
                with pytest.raises(ConnectFailed, match="Too many open files"):
                    await pods.serve(pods.context(*plans(pods)))
        assert not pods.breaker.records()
        assert (await pods.serve(pods.context(*plans(pods)))).status == 200


@pytest.mark.parametrize("attempts", [None, 11])
@pytest.mark.parametrize("behaviour", [resetting, silent, BUSY])
async def test_two_pods_at_most_fail_a_request_that_they_received(behaviour: Behaviour, attempts: int | None) -> None:
    """What crashes two engines would crash them all, also with a policy that allows more."""
    pods_by_id: dict[str, Any] = dict.fromkeys("abcdef", behaviour)
    async with town(first_byte_s=0.2, retries=10, **pods_by_id) as pods:
        context = pods.context(*plans(pods))
        context.policy = replace(POLICIES["cost_aware"], attempts=attempts)
        with contextlib.suppress(UpstreamError):
            await pods.serve(context)
        assert [len(pod.asked) for pod in pods.made.values()] == [1, 1, 0, 0, 0, 0]


async def test_a_pod_that_a_request_crashes_over_a_kept_connection_has_received_it() -> None:
    """It accepts no connection afterwards, but that is not the failure of a pod that was down before."""
    async with town(retries=10, a=ANSWERING, b=ANSWERING, c=ANSWERING, d=ANSWERING) as pods:
        for plan in plans(pods):
            await pods.serve(pods.context(plan))
            pods.made[plan.pod.id].behaviour = pods.crashing(plan.pod.id)
        with pytest.raises(UpstreamBroken):
            await pods.serve(pods.context(*plans(pods)))
        assert [len(pod.asked) for pod in pods.made.values()] == [2, 2, 1, 1]
        assert [pods.failures(pod) for pod in "abcd"] == [0, 0, 0, 0]


# --- requests that may not be repeated ---


@pytest.mark.parametrize(("method", "asked"), [("POST", 0), ("PATCH", 0), ("GET", 1), ("PUT", 1), ("DELETE", 1)])
@pytest.mark.parametrize("behaviour", [resetting, silent, BUSY])
async def test_an_unread_request_is_repeated_only_if_it_is_idempotent(
    behaviour: Behaviour, method: str, asked: int
) -> None:
    """A second POST to /v1/responses would create a second response."""
    async with town(first_byte_s=0.2, a=behaviour, b=ANSWERING) as pods:
        with contextlib.suppress(UpstreamError):
            await pods.serve(pods.unread(method, *plans(pods)))
        assert (len(pods.made["a"].asked), len(pods.made["b"].asked)) == (1, asked)


async def test_the_response_to_a_request_that_may_not_be_repeated_is_relayed() -> None:
    """Also a 503, after which another request would be tried elsewhere."""
    async with town(a=BUSY, b=ANSWERING) as pods:
        client = await pods.serve(pods.unread("POST", *plans(pods)))
        assert (client.status, client.json) == (503, {"error": {"message": "busy"}})


async def test_an_unread_request_that_was_not_sent_is_tried_elsewhere() -> None:
    """The first pod accepts no connection."""
    async with town(a=ANSWERING, b=ANSWERING) as pods:
        first, second = plans(pods)
        closed = Direct(replace(first.pod, url="http://127.0.0.1:1"))
        assert (await pods.serve(pods.unread("POST", closed, second))).status == 200
        assert len(pods.made["b"].asked) == 1


@pytest.mark.parametrize(("method", "asked"), [("POST", 1), ("PUT", 2)])
async def test_a_request_that_may_not_be_repeated_uses_no_kept_connection(method: str, asked: int) -> None:
    """If that died, nobody would know whether it transported the request."""
    async with town(a=ANSWERING) as pods:
        await pods.serve(pods.context(*plans(pods)))
        pods.made["a"].asked.clear()
        pods.made["a"].behaviour = resetting
        with pytest.raises(UpstreamBroken):
            await pods.serve(pods.unread(method, *plans(pods)))
        assert len(pods.made["a"].asked) == asked


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


async def test_an_error_that_repeats_the_prompt_has_no_first_token() -> None:
    """It would count as a prompt that was computed in no time, and clear the doubts about other pods."""
    repeating = saying({"detail": [{"input": {"role": "user", "content": "hi"}}]}, 422)
    async with town(a=resetting, b=repeating) as pods:
        context = pods.context(*plans(pods), prompt=PROMPT, stream=True)
        pods.calibrator.observe_prefill = NotImplemented  # type: ignore[method-assign]
        assert (await pods.serve(context)).status == 422
        assert (context.first_token_s, pods.failures("a"), pods.doubts("a")) == (None, 0, 1)


async def test_a_first_token_shows_that_a_pod_is_alive() -> None:
    """It may be too busy for its health check while it streams."""
    more = asyncio.Event()

    async def long(asked: Asked) -> None:
        await asked.begin()
        await asked.event(TOKEN)
        await more.wait()
        await asked.end()

    async with town(a=long) as pods:
        client = Client()
        pods.breaker.probe_failed("a", 0.0)
        pods.breaker.probe_failed("a", 0.0)
        serving = asyncio.create_task(pods.serve(pods.context(*plans(pods), stream=True), client))
        await pods.until(client.wrote.is_set)
        pods.breaker.probe_failed("a", 0.0)
        more.set()
        await serving
        assert pods.fleet.snapshot.pods[0].state is PodState.READY


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
        pods.store.on_dispatch = lambda sent: capacities.append(sent.capacity_blocks)
        for capacity_tokens in (None, 64):
            plan = Direct(replace(pods.pod("a"), capacity_tokens=capacity_tokens))
            await pods.serve(pods.context(plan, prompt=PROMPT))
        assert capacities == [62, 4]


ERROR_BODIES = {
    "nothing": b"",
    "a token": b'{"choices": [{"message": {"content": "hello"}}]}',
    "usage": b'{"usage": {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 99}}}',
    "an error event": b'data: {"error": {"message": "KV load failed", "code": 500}}\n\n',
    "another status": b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n",
    "a large one": b'{"error": "' + b"x" * 5_000_000 + b'"}',
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("sent", ERROR_BODIES.values(), ids=ERROR_BODIES)
async def test_the_body_of_a_refusal_ejects_no_pod(sent: bytes, stream: bool) -> None:
    """Engines repeat parts of the request in it, so a client can choose its text. Only the status counts; a 4xx, 501 or
    505 never, and a 500 of one client's requests does not eject."""
    status = 400

    async def refuse(asked: Asked) -> None:
        kind = b"text/event-stream" if stream else b"application/json"
        head = b"HTTP/1.1 %d X\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (status, kind, len(sent))
        await asked.send(head + sent)

    async with town(a=refuse) as pods:
        for status in (400, 404, 413, 422, 429, 499, 501, 505):
            for number in range(4):
                credentials = [(b"authorization", b"%d" % number)]
                context = pods.context(Direct(pods.pod("a")), headers=credentials, stream=stream)
                assert (await pods.serve(context)).status == status
                assert context.cached_tokens is None or context.result != "ok"
        assert not pods.breaker.records()
        status = 500
        for _ in range(20):
            await pods.serve(pods.context(Direct(pods.pod("a")), stream=stream))
        assert [one.state for one in pods.fleet.snapshot.pods] == [PodState.READY]
