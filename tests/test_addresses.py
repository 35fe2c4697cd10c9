"""Addresses are read and written in one way, whichever part of the program they are for."""

from __future__ import annotations

import pytest
from pydantic import SecretStr, TypeAdapter, ValidationError

from router.addresses import bracketed, join_address, read_address, read_host, split_url, url_address, url_host
from router.config.index_schema import split_redis_url
from router.config.pod_schema import DiscoveredPods, DnsName, KvEvents, PodConfig, TargetGroup
from router.config.schema import AdminListen, Limits, Listen
from router.engines.adapter import on_pod
from router.engines.handoff.addresses import foreign_address
from router.errors import ConfigError
from router.feeds.discovery.pod_facts import discovered_pod
from router.feeds.zmtp import binds
from router.frontends.admin.admin_access import is_own_name
from router.frontends.extproc.metadata import host_of
from router.frontends.extproc.picks import gateway_address
from router.frontends.http.upstream import UpstreamPool
from router.request.decisions import addresses_of
from tests.kit.scenes import make_pod

ZONE = "has a zone"


@pytest.mark.parametrize(
    ("host", "port", "text"),
    [("a.example", 80, "a.example:80"), ("10.0.0.1", 8000, "10.0.0.1:8000"), ("::1", 5557, "[::1]:5557")],
)
def test_what_is_written_is_read_again(host: str, port: int, text: str) -> None:
    assert join_address(host, port) == text
    assert read_address(text) == (host, port)
    assert url_address(f"http://{text}/prefix") == (host, port)
    assert join_address(bracketed(host), port) == text


@pytest.mark.parametrize("text", ["::1", "[::1]", "[0:0:0:0:0:0:0:1]", "0::1"])
def test_an_ipv6_address_has_one_form(text: str) -> None:
    """However it was written: own addresses are compared with those that pods and gateways name."""
    assert read_host(text) == "::1"
    assert read_address(text, 53) == ("::1", 53)


@pytest.mark.parametrize(
    "text", ["::1:8000", "[::1:8000", "[::1]", "::1]:1", "a", "a:", "a:b", ":80", "a:99999", "a:-1", "a b:1", "u@a:1"]
)
def test_what_may_be_read_in_two_ways_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT|host name") as caught:
        read_address(text)
    assert len(text) < 3 or text not in str(caught.value).replace("[::1]:8000", "")


@pytest.mark.parametrize("address", ["[fe80::1%eth0]:8000", "[fe80::1%25eth0]:8000"])
def test_an_address_with_a_zone_is_refused_by_name_unless_it_is_listened_on(address: str) -> None:
    """Pods and routers on other machines could not use it."""
    with pytest.raises(ValueError, match=ZONE):
        read_address(address)
    with pytest.raises(ValueError, match=ZONE):
        split_url(f"http://{address}")
    for settings in (
        {"url": f"http://{address}"},
        {"url": "http://a:1", "kv_events": {"endpoint": f"tcp://{address}"}},
        {"url": "http://a:1", "handoff_hosts": ["fe80::1%eth0"]},
    ):
        with pytest.raises(ValidationError, match=ZONE):
            PodConfig.model_validate(settings)
    with pytest.raises(ValidationError, match=ZONE):
        TargetGroup.model_validate({"targets": [address]})
    assert Listen(host="fe80::1%eth0").host == "fe80::1%eth0"


def test_a_url_without_brackets_says_what_to_write() -> None:
    with pytest.raises(ValueError, match=r"in brackets: http://\[::1\]:8000"):
        split_url("http://::1:8000")


def test_listeners_take_an_address_with_and_without_brackets() -> None:
    """The value that is bound is the same."""
    assert Listen(host="[::]").host == Listen(host="0:0::0").host == "::"
    assert AdminListen(host="[::1]").host == "::1"


def test_a_pod_of_ipv6_is_reached_by_all_that_names_it() -> None:
    pod = make_pod(url="http://[fd00::0:3]/prefix")
    assert UpstreamPool("p", pod.url, Limits()).path_prefix == b"/prefix"
    assert on_pod("tcp://*:5557", pod) == on_pod("tcp://[::]:5557", pod) == "tcp://[fd00::3]:5557"
    assert gateway_address(pod) == "[fd00::3]:80"
    assert addresses_of(pod.url) == ("[fd00::3]:80", "fd00::3")


def test_a_gateway_names_a_pod_at_the_default_port() -> None:
    """Its URL has no port; the gateway's address always has one."""
    assert "10.0.0.1:80" in addresses_of("http://10.0.0.1")
    assert "10.0.0.1:443" in addresses_of("https://10.0.0.1")


def test_a_handoff_may_name_its_own_host_in_any_form() -> None:
    pod = make_pod(url="http://[fd00::3]:8000", handoff_hosts=("fd00::4",))
    for own in ("fd00::3", "[fd00:0::3]:5600", "tcp://[fd00::4]:1", "http://[FD00::3]/x"):
        assert foreign_address({"remote_host": own}, pod) == ""
    for foreign in ("fd00::5", "[fd00::5]:5600", "fd00::3:5600:1", "[fd00::3", "[fd00::3]evil:1"):
        assert foreign_address({"remote_host": foreign}, pod)


def test_discovered_pods_have_urls_and_events_with_brackets() -> None:
    """IPv6 addresses of Kubernetes, of AAAA records and of files."""
    group = DiscoveredPods.model_validate({"kv_events": {"endpoint": "tcp://{host}:5557"}})
    pod = discovered_pod("fd00::7", 8000, group)
    assert pod.url == "http://[fd00::7]:8000"
    assert isinstance(pod.kv_events, KvEvents)
    assert pod.kv_events.endpoint == "tcp://[fd00::7]:5557"
    assert TargetGroup.model_validate({"targets": ["[fd00::7]:8000"]}).targets == ("[fd00::7]:8000",)


@pytest.mark.parametrize("host", ["*", "fe80::1%eth0", "a b", "[fd00::1"])
def test_an_address_of_a_discovered_pod_that_is_none_is_refused(host: str) -> None:
    """Also where it is part of the endpoint of KV events."""
    with pytest.raises(ConfigError):
        discovered_pod(host, 8000, DiscoveredPods.model_validate({"kv_events": {"endpoint": "tcp://{host}:5557"}}))


@pytest.mark.parametrize("server", ["10.0.0.10", "10.0.0.10:53", "fd00::10", "[fd00::10]", "[fd00::10]:5353"])
def test_a_dns_server_may_be_of_ipv6(server: str) -> None:
    assert DnsName(name="pods", port=1, server=server).server == server


@pytest.mark.parametrize("server", ["dns.example", "fd00::10:53:0:0:0:0:0:1:2", "[fd00::10", "10.0.0.10:x"])
def test_a_dns_server_that_is_no_ip_address_is_refused(server: str) -> None:
    with pytest.raises(ValidationError, match="must be an IP address"):
        DnsName(name="pods", port=1, server=server)


def test_redis_may_be_of_ipv6() -> None:
    url = SecretStr("redis://:secret@[fd00:0::1]:7000,[fd00::2]/1")
    assert split_redis_url(url).nodes == (("fd00::1", 7000), ("fd00::2", 6379))


@pytest.mark.parametrize(
    ("endpoint", "is_bound"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("tcp://[0::0]:5557", True),
        ("tcp://[::1]:5557", False),
        ("tcp://10.0.0.1:5557", False),
        ("ipc:///tmp/*", False),
    ],
)
def test_wildcards_of_both_families_are_bound(endpoint: str, is_bound: bool) -> None:
    assert TypeAdapter(KvEvents).validate_python({"endpoint": endpoint}).endpoint == endpoint
    assert binds(endpoint) is is_bound


@pytest.mark.parametrize("endpoint", ["tcp://::1:5557", "tcp://[::1]", "tcp://[::1]:99999", "udp://a:1", "ipc://"])
def test_an_endpoint_of_events_that_cannot_be_connected_to_is_refused(endpoint: str) -> None:
    with pytest.raises(ValidationError):
        KvEvents(endpoint=endpoint)


@pytest.mark.parametrize(
    ("peer", "host"), [("10.0.0.1:4711", "10.0.0.1"), ("[fd00::1]:4711", "fd00::1"), ("", ""), ("unix:/tmp/a", "")]
)
def test_the_host_of_a_peer_of_a_gateway(peer: str, host: str) -> None:
    assert host_of(peer) == host


@pytest.mark.parametrize("name", ["[::1]:9480", "[::1]", "127.0.0.1:9480", "localhost", "Admin.example:1"])
def test_own_names_of_the_admin_listener(name: str) -> None:
    assert is_own_name(name, "admin.example")


def test_a_name_in_a_url_has_no_case() -> None:
    assert url_host("http://Pod-0:8000") == "pod-0"
