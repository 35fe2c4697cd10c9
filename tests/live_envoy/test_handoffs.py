"""Prefill and decode pods behind a real Envoy: who sends the prefill request, and what the decode pod receives."""

from __future__ import annotations

import httpx
import pytest

from tests.live_envoy.gateway import (
    DUPLEX,
    Bootstrap,
    Change,
    Gateway,
    chat,
    listener_of,
    post,
    running_gateway,
    wait_for,
)

pytestmark = pytest.mark.net
TEXT = "Which rivers of Europe are the longest? " * 20
HEADER = "x-prefiller-host-port"


def reports_prefill_pod(bootstrap: Bootstrap) -> None:
    """Add the header that the pod was sent to responses."""
    added = [{"header": {"key": "x-sent", "value": f"%REQ({HEADER})%"}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}]
    listener_of(bootstrap)["route_config"]["response_headers_to_add"] = added


def counted(pod: int, name: str) -> float:
    """A counter of an engine."""
    lines = httpx.get(f"http://127.0.0.1:{pod}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}_total"))


def handoffs(gateway: Gateway) -> list[tuple[str, float]]:
    return [(name, value) for name, value in gateway.figures("warmroute_handoffs_total").items() if value]


@pytest.mark.parametrize("change", [(), (DUPLEX,)], ids=["documented", "duplex"])
@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
def test_the_decode_pod_fetches_what_the_pickers_prefill_request_has_computed(
    change: tuple[Change, ...], stream: bool
) -> None:
    with running_gateway(*change, handoff="nixl") as gateway:
        prefill, decode = gateway.pods
        answer = post(gateway, chat(TEXT, stream=stream))
        assert (answer.status_code, answer.headers["x-warmroute-pod"]) == (200, f"127.0.0.1:{decode}"), answer.text
        assert counted(prefill, "generation_tokens") == 1, "one request, for one token"
        assert counted(decode, "external_prefix_cache_hits") > 100, "its body named the KV of the prefill pod"
        wait_for(lambda: gateway.in_flight() == 0, "still booked", 10)
        [(result, count)] = handoffs(gateway)
        assert 'result="ok"' in result and count == 1


def test_llm_ds_sidecar_receives_the_prefill_pod_and_no_other() -> None:
    with running_gateway(reports_prefill_pod, handoff="nixl", picker={"prefill": "sidecar"}) as gateway:
        prefill, decode = gateway.pods
        answer = post(gateway, chat(TEXT), headers={HEADER: "10.9.9.9:1"})
        assert (answer.status_code, answer.headers["x-warmroute-pod"]) == (200, f"127.0.0.1:{decode}")
        assert answer.headers["x-sent"] == f"127.0.0.1:{prefill}"
        assert counted(prefill, "generation_tokens") == 0, "the sidecar would send it"
