"""A picker behind a real Envoy, with the configuration of the documentation and its variants."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import random
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.live_envoy.digesting_pod import digesting_pod
from tests.live_envoy.gateway import (
    DUPLEX,
    MODEL,
    Bootstrap,
    Change,
    Gateway,
    chat,
    ext_proc_of,
    kill,
    listener_of,
    modes,
    original_dst,
    picker_is_healthy,
    post,
    running_gateway,
    wait_for,
)

pytestmark = pytest.mark.net
BUFFERED = modes(request_body_mode="BUFFERED", request_trailer_mode="SKIP")
SETUPS: dict[str, tuple[Change, ...]] = {
    "documented": (),
    "duplex": (DUPLEX,),
    "original_dst": (original_dst,),
    "buffered": (BUFFERED,),
    "answering": (),
}
PICKER: dict[str, Any] = {"message_timeout_s": 5.0}
"""As in the configuration of Envoy; it counts where Envoy buffers."""
REQUESTS = 1000


@pytest.fixture(scope="module", params=SETUPS)
def gateway(request: pytest.FixtureRequest) -> Iterator[Gateway]:
    setup, limits = SETUPS[request.param], {"max_body_bytes": 64 << 20}
    picker = PICKER | ({"requests": "picker"} if request.param == "answering" else {})
    with running_gateway(*setup, engines=3, picker=picker, limits=limits) as running:
        yield running


def test_requests_go_to_the_pod_that_the_picker_names(gateway: Gateway) -> None:
    """The picker's header names it; the mock engines count what they receive."""
    served = [post(gateway, chat(f"{number}")) for number in range(12)]
    assert {one.status_code for one in served} == {200}
    named = [one.headers["x-warmroute-pod"] for one in served]
    assert len(set(named)) == 3, "requests without a shared prefix spread"
    text = "One long story that all of them share, word for word. " * 100
    assert len({post(gateway, chat(f"{text}{number}")).headers["x-warmroute-pod"] for number in range(5)}) == 1


def test_streams_are_exact_to_the_byte(gateway: Gateway) -> None:
    """But for ids and times, which the engine makes for each."""
    body = chat("Count.", stream=True, max_tokens=64, seed=1)
    port = gateway.pods[0]

    def events(url: str) -> list[Any]:
        lines = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).text.split("\n\n")
        datas = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
        assert lines[-2:] == ["data: [DONE]", ""]
        return [one["choices"] for one in datas]

    assert events(gateway.url) == events(f"http://127.0.0.1:{port}")


def test_errors_have_the_shape_of_the_api(gateway: Gateway) -> None:
    refused = post(gateway, chat(model="nope"))
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    refused = post(gateway, chat(model="nope"), "/v1/messages")
    assert (refused.status_code, refused.json()["type"]) == (404, "error")


def test_chunked_and_bodyless_requests_are_served(gateway: Gateway) -> None:
    content = json.dumps(chat()).encode()
    pieces = (content[start : start + 20] for start in range(0, len(content), 20))
    kind = {"content-type": "application/json"}
    sent = httpx.post(f"{gateway.url}/v1/chat/completions", content=pieces, headers=kind, timeout=60)
    assert sent.status_code == 200
    assert httpx.get(f"{gateway.url}/v1/models").json()["data"][0]["id"] == MODEL


def running_at(pod: int) -> float:
    """Requests at an engine."""
    lines = httpx.get(f"http://127.0.0.1:{pod}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:num_requests_"))


async def some_requests(gateway: Gateway) -> int:
    """Requests whose clients leave at random moments. Returns how many stayed."""
    chance, stayed = random.Random(39), 0
    limits = httpx.Limits(max_connections=40)
    async with httpx.AsyncClient(base_url=gateway.url, limits=limits, timeout=120) as client:

        async def one(number: int) -> None:
            nonlocal stayed
            body = chat(f"{number} " * chance.randrange(1, 2000), stream=bool(number % 2), max_tokens=40)
            try:
                async with asyncio.timeout(chance.choice((0.002, 0.02, 0.1, 0.3, 60))):
                    answer = await client.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
                stayed += 1
            except TimeoutError:
                pass

        for start in range(0, REQUESTS, 30):
            await asyncio.gather(*map(one, range(start, start + 30)))
    return stayed


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # of httpx
def test_nothing_stays_booked_when_clients_leave_at_any_moment(gateway: Gateway) -> None:
    assert asyncio.run(some_requests(gateway)) > 30
    gc.collect()  # what httpx has left open is reported in this test, and not in a later one
    wait_for(lambda: gateway.in_flight() == 0, f"still booked: {gateway.in_flight()}", 30)
    assert "Traceback" not in gateway.log("picker"), gateway.log("picker")[-3000:]
    assert gateway.stat("ext_proc.spurious_msgs_received") == 0
    streams = gateway.stat("ext_proc.streams_started")
    wait_for(lambda: gateway.stat("ext_proc.streams_closed") == streams, "Envoy has streams to the picker", 30)
    active = (gateway.stat("cluster.pods.upstream_rq_active"), gateway.stat("cluster.picker.upstream_rq_active"))
    assert (*active, gateway.stat("http.clients.downstream_rq_active")) == (0, 0, 0)
    wait_for(lambda: [running_at(pod) for pod in gateway.pods] == [0, 0, 0], "engines have requests", 30)


@pytest.mark.parametrize("change", [(), (DUPLEX,)], ids=["documented", "duplex"])
def test_large_bodies_arrive_whole(change: tuple[Change, ...]) -> None:
    """The pods answer with a digest of what they have received."""
    limits: dict[str, Any] = {"limits": {"max_body_bytes": 64 << 20}, "edge": {"extra_paths": ["/digest"]}}
    with digesting_pod() as port, running_gateway(*change, other_pods=[port], **limits) as gateway:
        for megabytes in (0.1, 1.2, 5, 20):
            text = random.Random(1).randbytes(int(megabytes * 500_000)).hex()
            body = json.dumps({"model": MODEL, "text": text}).encode()
            kind = {"content-type": "application/json"}
            sent = httpx.post(f"{gateway.url}/digest", content=body, headers=kind, timeout=120)
            assert sent.text == hashlib.sha256(body).hexdigest(), megabytes


def refuses_without_picker(bootstrap: Bootstrap) -> None:
    ext_proc_of(bootstrap)["failure_mode_allow"] = False


def test_without_a_picker_requests_go_to_any_pod() -> None:
    """FailOpen, with the health check and the panic threshold of the documentation."""
    with running_gateway() as gateway:
        kill(gateway, "picker")
        wait_for(lambda: not picker_is_healthy(gateway), "Envoy sees the picker still", 30)
        answers = [post(gateway, chat()) for _ in range(5)]
        assert {one.status_code for one in answers} == {200}
        assert all("x-warmroute-pod" not in one.headers for one in answers)


def test_without_a_picker_requests_fail_where_that_is_configured() -> None:
    with running_gateway(refuses_without_picker) as gateway:
        assert post(gateway, chat()).status_code == 200
        kill(gateway, "picker")
        wait_for(lambda: not picker_is_healthy(gateway), "Envoy sees the picker still", 30)
        assert post(gateway, chat()).status_code >= 500


def test_a_client_cannot_choose_a_host_while_the_picker_is_away() -> None:
    with running_gateway(original_dst) as gateway:
        kill(gateway, "picker")
        wait_for(lambda: not picker_is_healthy(gateway), "Envoy sees the picker still", 30)
        host = gateway.envoy_admin.removeprefix("http://")
        answer = httpx.get(f"{gateway.url}/stats", headers={"x-gateway-destination-endpoint": host})
        assert answer.status_code == 503


def test_a_dead_pod_is_replaced_by_the_next_fallback() -> None:
    with running_gateway(
        engines=3, picker={"fallbacks": 2}, probes={"self_test": False, "health_interval_s": 60}
    ) as gateway:
        text = "One long story that all of them share, word for word. " * 100
        first = post(gateway, chat(text)).headers["x-warmroute-pod"]
        kill(gateway, f"pod{[f'127.0.0.1:{pod}' for pod in gateway.pods].index(first)}")
        answer = post(gateway, chat(text))
        assert (answer.status_code, answer.headers["x-warmroute-pod"] != first) == (200, True)
        wait_for(lambda: gateway.in_flight() == 0, "still booked", 10)


def slow_stream(gateway: Gateway, act_at: int, act: Any) -> tuple[int, bool]:
    """Read a stream of 100 tokens, and act after some. Returns events, and whether it was complete."""
    events, text = 0, ""
    body = chat("Count.", stream=True, max_tokens=100, ignore_eos=True)
    with httpx.stream("POST", f"{gateway.url}/v1/chat/completions", json=body, timeout=60) as response:
        try:
            for piece in response.iter_text():
                text += piece
                events += piece.count("data: ")
                if events >= act_at and act is not None:
                    act()
                    act = None
        except httpx.TransportError:
            return events, False
    return events, "[DONE]" in text


def test_a_drained_picker_loses_no_stream() -> None:
    with running_gateway(time_scale=5.0) as gateway:
        events, complete = slow_stream(gateway, 5, lambda: gateway.processes["picker"].send_signal(signal.SIGTERM))
        assert complete and events > 90
        wait_for(lambda: gateway.processes["picker"].poll() == 0, "the picker did not end", 40)


def test_a_killed_picker_loses_no_stream_without_trailers() -> None:
    with running_gateway(modes(response_trailer_mode="SKIP"), time_scale=5.0) as gateway:
        events, complete = slow_stream(gateway, 5, lambda: kill(gateway, "picker"))
        assert complete and events > 90


def default_timeout(bootstrap: Bootstrap) -> None:
    del ext_proc_of(bootstrap)["message_timeout"]


@pytest.mark.parametrize(("change", "status"), [((), 200), ((default_timeout,), 504)], ids=["documented", "default"])
def test_a_picker_that_pauses_delays_a_response(change: tuple[Change, ...], status: int) -> None:
    """With Envoy's own `message_timeout` it costs the response, although the pod has answered."""
    with running_gateway(*change, engines=1, time_scale=5.0) as gateway, ThreadPoolExecutor(1) as thread:
        answer = thread.submit(post, gateway, chat("Count.", max_tokens=40, ignore_eos=True))
        wait_for(lambda: running_at(gateway.pods[0]), "the engine has no request", 30)
        gateway.processes["picker"].send_signal(signal.SIGSTOP)
        wait_for(lambda: not running_at(gateway.pods[0]), "the engine does not answer", 30)
        time.sleep(1.0)  # the picker pauses longer than the default
        gateway.processes["picker"].send_signal(signal.SIGCONT)
        assert answer.result().status_code == status


def takes_trailers(bootstrap: Bootstrap) -> None:
    listener_of(bootstrap)["http_protocol_options"] = {"enable_trailers": True}


def without_retries(bootstrap: Bootstrap) -> None:
    [host] = listener_of(bootstrap)["route_config"]["virtual_hosts"]
    del host["routes"][0]["route"]["retry_policy"]


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ((), 400),  # Envoy sends the body twice: its router has kept it for a retry
        ((without_retries,), 200),
        ((BUFFERED,), 200),
        ((modes(request_body_mode="BUFFERED"),), 200),
    ],
    ids=["documented", "without retries", "buffered", "buffered with trailers"],
)
def test_requests_with_trailers_are_served_but_by_a_route_that_retries(change: tuple[Change, ...], status: int) -> None:
    with running_gateway(takes_trailers, *change, engines=1, picker=PICKER) as gateway:
        body = json.dumps(chat()).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {MODEL}\r\nconnection: close\r\n"
        head += "content-type: application/json\r\ntransfer-encoding: chunked\r\n"
        sent = b"%b\r\n%x\r\n%b\r\n0\r\nx-digest: 1\r\n\r\n" % (head.encode(), len(body), body)
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=20) as client:
            client.sendall(sent)
            assert client.recv(1000).startswith(b"HTTP/1.1 %d " % status)
        wait_for(lambda: gateway.in_flight() == 0, "still booked", 10)
