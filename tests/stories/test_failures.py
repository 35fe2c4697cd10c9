"""What does a client notice when pods fail, and what does a pod notice when clients leave?"""

from __future__ import annotations

import asyncio
import itertools
from http import HTTPStatus
from typing import Any

import httpx
import pytest

from router.sim.mock_engine import Fault, FaultKind
from tests.stories.conftest import City, OpenCity
from tests.stories.test_first_light import opening

pytestmark = [pytest.mark.net, pytest.mark.anyio]

SLOW: dict[str, Any] = {"time_scale": 1.0}


async def holder_of(city: City, topic: str) -> int:
    """Warm a conversation; the number of the engine that took it."""
    answer = await city.chat(opening(topic))
    pod = answer.headers["x-warmroute-pod"]
    return next(number for number, engine in enumerate(city.engines) if engine.url.endswith(pod))


@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind=FaultKind.REFUSE),
        Fault(kind=FaultKind.RESET, count=2),  # once for the kept-alive connection, once for the new one
        Fault(kind=FaultKind.STATUS, status=HTTPStatus.SERVICE_UNAVAILABLE),
    ],
    ids=lambda fault: fault.kind.value,
)
async def test_a_pod_that_fails_before_the_first_byte_costs_no_request(open_city: OpenCity, fault: Fault) -> None:
    """The next candidate answers, streamed or not, and the leases are all given back."""
    async with open_city(pods=2) as city:
        at = await holder_of(city, "stones")
        city.engines[at].inject(fault)
        answer = await city.chat(opening("stones"), stream=True)
        assert answer.status_code == 200
        assert answer.text.endswith("data: [DONE]\n\n")
        assert not answer.headers["x-warmroute-pod"].endswith(city.engines[at].url.removeprefix("http://"))
        assert not city.program.pods.ledger.inflight()


async def test_a_pod_killed_in_mid_run_costs_no_unstreamed_request(open_city: OpenCity) -> None:
    """Twenty requests are under way on two pods when one dies: twenty answers."""
    async with open_city(pods=2, engine=SLOW) as city:
        asked = [asyncio.create_task(city.chat(opening(f"road {n}"), max_tokens=20)) for n in range(20)]
        await city.until(lambda: all(engine.load.running for engine in city.engines))
        await city.engines[0].stop()
        answers = await asyncio.gather(*asked)
        assert [answer.status_code for answer in answers] == [200] * 20
        assert not city.program.pods.ledger.inflight()


async def test_a_stream_that_breaks_off_ends_with_an_error_that_sdks_raise_on(open_city: OpenCity) -> None:
    """Bytes have gone out, so that nobody else can take over: the client is told, in the stream."""
    async with open_city(pods=2) as city:
        for engine in city.engines:
            engine.inject(Fault(kind=FaultKind.CUT, after_chunks=3))
        answer = await city.chat(opening("bridges"), max_tokens=30, stream=True)
        last = answer.text.strip().split("\n\n")[-1]
        assert answer.status_code == 200
        assert last.startswith('data: {"error":{')
        assert "upstream_broken" in last


async def test_every_pod_failing_is_a_clear_502(open_city: OpenCity) -> None:
    """OpenAI's error shape, naming the pod and what it did."""
    async with open_city(pods=2) as city:
        for engine in city.engines:
            engine.inject(Fault(kind=FaultKind.RESET, count=None))
        answer = await city.chat(opening("walls"))
        assert answer.status_code == 502
        assert answer.json()["error"]["type"] == "upstream_error"
        assert "closed the connection" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_stops_its_pod_at_once(open_city: OpenCity, stream: bool) -> None:
    """The pod's running requests and the router's leases go back to zero; it counts as nobody's failure."""
    async with open_city(pods=1, engine=SLOW) as city:
        body = {"model": "demo", "messages": opening("winds"), "max_tokens": 5000, "stream": stream}
        asking = asyncio.create_task(city.client.post("/v1/chat/completions", json=body))
        await city.until(lambda: city.engines[0].load.running == 1)
        asking.cancel()
        await asyncio.wait([asking])
        await city.until(lambda: city.engines[0].load.running == 0)
        await city.until(lambda: not city.program.pods.ledger.inflight())
        metrics = (await city.client.get("/metrics")).text
        assert 'result="client_gone"} 1.0' in metrics
        assert city.ready() == 1


async def test_an_ejected_pod_comes_back_when_it_answers_again(open_city: OpenCity) -> None:
    """Unhealthy: no requests. Healthy again: probed, proven anew, used."""
    async with open_city(pods=1) as city:
        city.engines[0].inject(Fault(kind=FaultKind.UNHEALTHY, count=None))
        await city.until(lambda: city.ready() == 0)
        await city.engines[0].heal()
        await city.until(city.all_trusted)
        assert (await city.chat(opening("fields"))).status_code == 200


async def test_a_restarted_engine_is_not_credited_with_what_it_had(open_city: OpenCity) -> None:
    """Its event numbers begin anew, so that its blocks are forgotten, and the next prediction is true."""
    async with open_city(pods=1) as city:
        await city.chat(opening("clouds"))
        first_life = city.program.fleet.snapshot.pods[0].pod.epoch
        city.engines[0].inject(Fault(kind=FaultKind.RESTART))

        numbers = itertools.count()

        async def noticed() -> bool:
            await city.chat(opening(f"rain {next(numbers)}"))
            return city.program.fleet.snapshot.pods[0].pod.epoch != first_life

        await city.until(noticed)
        await city.until(city.all_trusted)
        answer = await city.chat(opening("clouds"))
        assert int(answer.headers["x-warmroute-cached-tokens"]) == 0
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_lost_events_are_fetched_again(open_city: OpenCity) -> None:
    """A gap in the stream is healed by replay: predictions stay exact."""
    async with open_city(pods=1) as city:
        city.engines[0].inject(Fault(kind=FaultKind.LOSE_EVENTS, count=2))
        chat = opening("snow")
        await city.chat(chat)
        await city.chat(opening("ice"))
        await city.chat(opening("hail"))
        pod = city.program.fleet.snapshot.pods[0].pod.id
        await city.until(lambda: city.program.pods.kv_streams.state_of(pod) == "complete")
        answer = await city.chat(chat)
        predicted = int(answer.headers["x-warmroute-cached-tokens"])
        assert predicted == answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_a_hanging_pod_is_given_up_after_its_deadline(open_city: OpenCity) -> None:
    """It accepts and never answers: another one does."""
    from router.config.schema import Limits

    async with open_city(pods=2, limits=Limits(first_byte_timeout_s=0.3)) as city:
        at = await holder_of(city, "caves")
        city.engines[at].inject(Fault(kind=FaultKind.HANG))
        assert (await city.chat(opening("caves"))).status_code == 200


async def test_admin_calls_from_elsewhere_are_refused(open_city: OpenCity) -> None:
    """Whoever may add a pod may read every prompt: only this machine may."""
    async with open_city(pods=1) as city:
        transport = httpx.ASGITransport(app=city.program.app, client=("203.0.113.9", 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as stranger:
            assert (await stranger.get("/admin/pods")).status_code == 403
            assert (await stranger.post("/admin/pods", json={"url": "http://evil"})).status_code == 403
