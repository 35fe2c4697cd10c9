"""What Gateway API's conformance suite asks of a gateway with a picker, made again with a plain Envoy."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.live_envoy.digesting_pod import EVENTS, digesting_pod
from tests.live_envoy.gateway import (
    DUPLEX,
    Bootstrap,
    Gateway,
    chat,
    filters_of,
    kill,
    listener_of,
    picker_is_healthy,
    post,
    running_gateway,
    wait_for,
)

pytestmark = pytest.mark.net
SERVED = "x-served"
"""Header of the address that Envoy has sent the request to."""
HINT, FORCED = "x-hint", "test-epp-endpoint-selection"


def reports_address(bootstrap: Bootstrap) -> None:
    """Add the address of the pod to responses."""
    added = [{"header": {"key": SERVED, "value": "%UPSTREAM_REMOTE_ADDRESS%"}}]
    listener_of(bootstrap)["route_config"]["response_headers_to_add"] = added


def hints(bootstrap: Bootstrap) -> None:
    """Turn the header `HINT` into the hint that a gateway gives."""
    target = {
        "metadata_namespace": "envoy.lb.subset_hint",
        "key": "x-gateway-destination-endpoint-subset",
        "type": "STRING",
    }
    kind = "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config"
    rules = {"@type": kind, "request_rules": [{"header": HINT, "on_header_present": target, "remove": True}]}
    filters_of(bootstrap).insert(0, {"name": "envoy.filters.http.header_to_metadata", "typed_config": rules})


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with running_gateway(
        reports_address, hints, engines=3, picker={"test_header": True, "fallbacks": 1}, time_scale=0.0
    ) as running:
        yield running


def addresses(gateway: Gateway) -> list[str]:
    return [f"127.0.0.1:{port}" for port in gateway.pods]


def test_a_hundred_requests_stay_within_the_pods_that_the_picker_names(gateway: Gateway) -> None:
    """Ten at a time. For each set of addresses, all of it is used and nothing else."""
    first, second, third = addresses(gateway)
    for allowed in ({first}, {second}, {second, third}, {first, second, third}):

        def served(number: int, allowed: set[str] = allowed) -> tuple[str, str]:
            answer = post(gateway, chat(f"{number}"), headers={FORCED: ",".join(sorted(allowed))})
            return answer.headers[SERVED], answer.headers["x-warmroute-pod"]

        with ThreadPoolExecutor(10) as threads:
            found = list(threads.map(served, range(100)))
        assert {one for one, _ in found} == allowed
        assert all(by_envoy == by_picker for by_envoy, by_picker in found)


def test_the_gateways_hint_limits_the_pods(gateway: Gateway) -> None:
    """An address with a port is one rank; without, all ranks of the host."""
    pods = addresses(gateway)
    for pod in pods:
        assert {post(gateway, chat(f"{n}"), headers={HINT: pod}).headers[SERVED] for n in range(10)} == {pod}
    everywhere = {post(gateway, chat(f"{n}"), headers={HINT: "127.0.0.1"}).headers[SERVED] for n in range(30)}
    assert everywhere == set(pods)


@pytest.mark.parametrize("hint", ["10.9.9.9:8000", "127.0.0.1:1"])
def test_no_pod_of_the_hint_is_503(gateway: Gateway, hint: str) -> None:
    refused = post(gateway, chat(), headers={HINT: hint})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_ready_pod")
    assert SERVED not in refused.headers, "no pod was asked"


def test_a_client_over_its_quota_is_429_with_the_time_to_wait(tmp_path: Path) -> None:
    file, digest = tmp_path / "tenants.yaml", sha256(b"key").hexdigest()
    file.write_text(f"tenants:\n- {{name: acme, keys: [{digest}], quotas: [{{requests_per_minute: 2}}]}}\n")
    with running_gateway(engines=1, tenants=str(file)) as gateway:
        answers = [post(gateway, chat(), headers={"authorization": "Bearer key"}) for _ in range(3)]
        assert [one.status_code for one in answers] == [200, 200, 429]
        assert 0 < int(answers[-1].headers["retry-after"]) < 70
        assert answers[-1].json()["error"]["code"] == "rate_limit_exceeded"


@pytest.mark.parametrize("change", [(), (DUPLEX,)], ids=["documented", "duplex"])
def test_event_streams_arrive_byte_for_byte(change: Any) -> None:
    """CRLF, comments, text that is cut within a character, a last line without its end."""
    with digesting_pod() as port, running_gateway(*change, other_pods=[port]) as gateway:
        body = json.dumps(chat(stream=True))
        for _ in range(20):
            answer = httpx.post(f"{gateway.url}/v1/chat/completions", content=body, headers=JSON, timeout=60)
            assert answer.content == EVENTS


JSON = {"content-type": "application/json"}


def speaks_http2_to_pods(bootstrap: Bootstrap) -> None:
    picker, pods = bootstrap["static_resources"]["clusters"]
    pods["typed_extension_protocol_options"] = picker["typed_extension_protocol_options"]


def without_picker(bootstrap: Bootstrap) -> None:
    filters_of(bootstrap)[:] = filters_of(bootstrap)[-1:]


def test_clients_and_pods_may_speak_http2_without_tls() -> None:
    """The pod is a mock engine behind an Envoy of its own, because mock engines speak HTTP/1 only."""
    with (
        running_gateway(without_picker, engines=1) as pod,
        running_gateway(speaks_http2_to_pods, other_pods=[pod.port]) as gateway,
    ):
        command = ["curl", "-s", "--http2-prior-knowledge", "-H", "content-type: application/json", "-d", "@-"]
        for stream in (False, True):
            sent = subprocess.run(
                [*command, "-w", "\n%{http_version} %{http_code}", f"{gateway.url}/v1/chat/completions"],
                input=json.dumps(chat(stream=stream)).encode(),
                capture_output=True,
                check=True,
            )
            assert sent.stdout.endswith(b"\n2 200"), sent.stdout
            assert (b"[DONE]" in sent.stdout) == stream
        assert gateway.stat("cluster.pods.upstream_cx_http2_total") > 0
        wait_for(lambda: gateway.in_flight() == 0, "still booked", 10)


def without_panic_threshold(bootstrap: Bootstrap) -> None:
    [picker] = [one for one in bootstrap["static_resources"]["clusters"] if one["name"] == "picker"]
    del picker["common_lb_config"]["healthy_panic_threshold"]


def test_fail_open_needs_the_panic_threshold() -> None:
    """Without it, Envoy asks the dead picker still. A request whose body is sent before the connection is refused fails
    with it; the others pass."""
    with running_gateway(without_panic_threshold, engines=1) as gateway:
        kill(gateway, "picker")
        wait_for(lambda: not picker_is_healthy(gateway), "Envoy sees the picker still", 30)
        assert 500 in [post(gateway, chat()).status_code for _ in range(20)]
