"""Pods join, are ejected and return."""

from __future__ import annotations

import time
from typing import Any

import httpx
import msgspec
import pytest
from structlog.testing import capture_logs

from router.engines.adapter import KvEventSource, PodFacts
from router.engines.engine_catalog import ENGINES
from router.errors import ConnectFailed
from router.feeds import probe
from router.feeds.probe import PodProbe
from router.fleet.breaker import Breaker, Probes
from router.fleet.fleet import Fleet, PodEvent
from router.types import Pod, PodId, PodState, PrefixTrust
from tests.kit.deadlines import running, until
from tests.kit.fake_pods import watched
from tests.kit.scenes import make_pod

pytestmark = pytest.mark.anyio
Network = Any
WELL = {
    "/health": b"",
    "/v1/models": b'{"data": [{"id": "m", "max_model_len": 4096}]}',
    "/metrics": b'vllm:cache_config_info{block_size="32",num_gpu_blocks="100"} 1.0\n',
    "/kv_event_sources": b'{"0": {"publisher": "zmq", "endpoint": "tcp://*:5557"}}',
}


class Probing:
    """A fleet of pod `a`, its probes, and the facts that were reported."""

    def __init__(self, network: Network, pod: Pod, backoff_s: tuple[float, float] = (0.0, 30.0), **probes: Any) -> None:
        self.fleet = Fleet()
        self.breaker = Breaker(self.fleet, Probes(**probes), backoff_s=backoff_s)
        self.described: list[tuple[int, PodState, PodFacts]] = []
        self.fleet.sync([pod])
        self.pod = network["a"]
        self.network = network
        asked = network.fetch
        self.probes = PodProbe(
            self.fleet, self.breaker, asked, self._take, Probes(health_interval_s=0.001, health_timeout_s=0.05)
        )

    def _take(self, pod: Pod, facts: PodFacts) -> None:
        self.described.append((pod.epoch, self.fleet.snapshot.pods[0].state, facts))
        self.fleet.describe(pod.id, models=facts.models)

    @property
    def now(self) -> Pod:
        return self.fleet.snapshot.pods[0].pod

    def is_in(self, state: PodState) -> bool:
        return self.fleet.snapshot.pods[0].state is state


@pytest.fixture
def world(network: Network) -> Probing:
    """Pod `a`, healthy."""
    network["a"].answers |= WELL
    return Probing(network, make_pod("a"))


async def test_a_pod_joins_after_it_has_been_described(world: Probing) -> None:
    """All its paths are fetched, it is described once, and it is READY after that."""
    async with running(watched(world.fleet, world.probes.check)):
        await until(lambda: world.is_in(PodState.READY))
        await until(lambda: world.pod.asked["/health"] > 5)
    kv_events = KvEventSource("tcp://a:5557", None)
    facts = PodFacts(
        models=("m",), max_model_len_tokens=4096, block_size_tokens=32, capacity_tokens=3200, kv_events=kv_events
    )
    assert world.described == [(world.now.epoch, PodState.JOINING, facts)]
    assert world.pod.asked["/v1/models"] == 1


async def test_a_pod_joins_when_it_is_healthy_and_lists_its_models(world: Probing) -> None:
    """Each reason is logged once."""
    world.pod.refuses = True
    models = world.pod.answers.pop("/v1/models")
    with capture_logs() as logs:
        async with running(watched(world.fleet, world.probes.check)):
            await until(lambda: world.pod.asked["/health"] > 2)
            world.pod.refuses = False
            world.pod.statuses["/health"] = 503
            await until(lambda: world.pod.asked["/health"] > 4)
            world.pod.statuses.clear()
            await until(lambda: world.pod.asked["/v1/models"] > 2)
            assert (world.is_in(PodState.JOINING), world.described) == (True, [])
            world.pod.answers["/v1/models"] = models
            await until(lambda: world.is_in(PodState.READY))
    assert [(log["event"], log["pod"]) for log in logs] == [("pod cannot be used", "a")] * 3
    reasons = [log["reason"] for log in logs]
    assert reasons[0].startswith("cannot connect") and reasons[1:] == [
        "503 Service Unavailable from /health",
        "404 Not Found from /v1/models",
    ]
    assert world.fleet.state_reason("a") == ""


async def test_a_pod_that_does_not_accept_the_routers_key_is_named_with_the_file_of_the_key(network: Network) -> None:
    network["a"].answers |= WELL
    network["a"].statuses["/health"] = 401
    world = Probing(network, make_pod("a", bearer_file="/run/key"))
    async with running(watched(world.fleet, world.probes.check)):
        await until(lambda: world.fleet.state_reason("a"))
    assert world.fleet.state_reason("a") == "401 Unauthorized; the engine does not accept the key of /run/key"


async def test_a_pod_with_an_open_health_path_says_that_its_models_need_a_key(world: Probing) -> None:
    """vLLM checks keys under /v1 only."""
    world.pod.statuses["/v1/models"] = 401
    async with running(watched(world.fleet, world.probes.check)):
        await until(lambda: world.fleet.state_reason("a"))
        assert world.is_in(PodState.JOINING)
    reason = "401 Unauthorized from /v1/models; set pods[].auth.bearer_file, or bearer_env, to the engine's API key"
    assert world.fleet.state_reason("a") == reason


async def test_a_router_that_can_open_no_connection_ejects_no_pod(world: Probing) -> None:
    """Nor does it take the pod for a restarted one afterwards."""
    failed: list[str] = []
    local = False

    async def fetch(pod: Pod, path: str, timeout_s: float) -> bytes:
        if local:
            failed.append(path)
            raise ConnectFailed("cannot connect: Too many open files", pod=pod.id, local=True)
        found: bytes = await world.network.fetch(pod, path, timeout_s)
        return found

    probes = PodProbe(world.fleet, world.breaker, fetch, lambda *_: None, Probes(health_interval_s=0.001))
    async with running(watched(world.fleet, probes.check)):
        await until(lambda: world.is_in(PodState.READY))
        epoch, local = world.now.epoch, True
        await until(lambda: len(failed) > 5)
        assert world.is_in(PodState.READY)
        local, asked = False, world.pod.asked["/health"]
        await until(lambda: world.pod.asked["/health"] > asked + 2)
    assert world.now.epoch == epoch


async def test_an_ejected_pod_says_why_its_probe_fails(world: Probing) -> None:
    """The reason ends when the pod is READY again."""
    async with running(watched(world.fleet, world.probes.check)):
        await until(lambda: world.is_in(PodState.READY))
        world.pod.statuses["/health"] = 503
        world.pod.answers.pop("/health")
        await until(lambda: world.is_in(PodState.EJECTED) and world.fleet.state_reason("a"))
        assert world.fleet.state_reason("a") == "503 Service Unavailable from /health"
        world.pod.answers["/health"] = b""
        world.pod.statuses.clear()
        await until(lambda: world.is_in(PodState.READY))
    assert world.fleet.state_reason("a") == ""


async def test_only_the_health_path_can_eject_a_pod(world: Probing) -> None:
    """A pod that should be described again serves until it answers."""
    async with running(watched(world.fleet, world.probes.check)):
        await until(lambda: world.is_in(PodState.READY))
        states: list[PodState] = []
        world.fleet.listen(lambda pod, old, new: states.append(new))
        world.pod.hangs |= {"/v1/models", "/metrics", "/kv_event_sources"}
        world.pod.refuses = True
        asked = world.pod.asked["/health"]
        await until(lambda: world.pod.asked["/health"] > asked)
        world.pod.refuses = False
        await until(lambda: world.pod.asked["/v1/models"] > 3)
        assert states == [PodState.READY]
        world.pod.hangs.clear()
        await until(lambda: len(world.described) == 2)
    assert states == [PodState.READY]


async def test_failed_probes_eject_and_a_passed_one_readmits(world: Probing) -> None:
    """The pod keeps its epoch and trust and is not described again."""
    async with running(watched(world.fleet, world.probes.check)):
        await until(lambda: world.is_in(PodState.READY))
        world.fleet.trust("a", PrefixTrust.TRUSTED, "")
        epoch = world.now.epoch
        world.pod.statuses["/health"] = 503
        await until(lambda: world.is_in(PodState.EJECTED))
        world.pod.statuses.clear()
        await until(lambda: world.is_in(PodState.READY))
    assert (world.now.epoch, world.now.trust) == (epoch, PrefixTrust.TRUSTED)
    assert len(world.described) == 1


@pytest.mark.parametrize("connects", [True, False])
async def test_probes_that_time_out_do_not_eject_the_last_pod(world: Probing, connects: bool) -> None:
    """Be it the answer or the connection that is late. Why it stays is logged once, until a probe passes."""
    is_late = False

    async def fetch(pod: Pod, path: str, timeout_s: float) -> bytes:
        if is_late and not connects:
            world.pod.asked[path] += 1
            raise ConnectFailed("not connected within 1 s", pod=pod.id) from TimeoutError()
        found: bytes = await world.network.fetch(pod, path, timeout_s)
        return found

    world.probes.fetch = fetch
    with capture_logs() as logs:
        async with running(watched(world.fleet, world.probes.check)):
            await until(lambda: world.is_in(PodState.READY))
            world.pod.hangs.add("/health")
            is_late, asked = True, world.pod.asked["/health"]
            await until(lambda: world.pod.asked["/health"] > asked + 6)
            kept = "3 health checks in a row failed, but it is the last ready pod of a model"
            assert (world.is_in(PodState.READY), world.fleet.state_reason("a")) == (True, kept)
            is_late = False
            world.pod.hangs.clear()
            await until(lambda: not world.fleet.state_reason("a"))
    assert logs == [{"event": "pod fails its health checks", "pod": "a", "reason": kept, "log_level": "warning"}]


async def test_a_passed_health_check_that_began_before_an_ejection_does_not_readmit(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod stays away for its backoff."""
    network["a"].answers |= WELL
    world = Probing(network, make_pod("a"), backoff_s=(3600.0, 3600.0))
    states: list[PodState] = []
    turns: list[PodState] = []
    may_probe = world.breaker.may_probe

    def counted(pod_id: PodId, now_s: float) -> bool:
        turns.extend(states[:1])
        return may_probe(pod_id, now_s)

    def ejected_meanwhile(_request: httpx.Request) -> bytes:
        for _ in range(0 if states else 3):
            world.breaker.probe_failed("a", time.monotonic())
        return b""

    async with running(watched(world.fleet, world.probes.check)):
        await until(lambda: world.is_in(PodState.READY))
        world.fleet.listen(lambda pod, old, new: states.append(new))
        monkeypatch.setattr(world.breaker, "may_probe", counted)
        world.pod.answers["/health"] = ejected_meanwhile
        await until(lambda: len(turns) > 3)
    assert states == [PodState.EJECTED]


@pytest.mark.parametrize(("before", "after"), [((), ("sql",)), (("sql",), ())], ids=["loaded", "unloaded"])
async def test_a_list_of_adapters_that_was_asked_for_before_a_change_is_dropped(
    world: Probing,
    monkeypatch: pytest.MonkeyPatch,
    before: tuple[str, ...],
    after: tuple[str, ...],
) -> None:
    """The next one counts."""
    monkeypatch.setattr(probe, "ADAPTERS_INTERVAL_S", 0.0)
    old = msgspec.json.encode({"data": [{"id": "m"}, *({"id": name, "parent": "m"} for name in before)]})
    asked: list[tuple[str, ...]] = []

    def models(request: httpx.Request) -> bytes:
        asked.append(world.now.adapters)
        if len(asked) == 3:
            world.fleet.learn("a", adapters=after)
        elif len(asked) > 3:
            raise httpx.ReadError("cut", request=request)
        return old

    world.pod.answers["/v1/models"] = models
    async with running(watched(world.fleet, world.probes.check)):
        await until(lambda: len(asked) > 4)
    assert asked[2:5] == [before, after, after]


async def test_single_failed_probes_do_not_eject(world: Probing) -> None:
    """Two of three fail, but never three in a row."""

    def flapping(request: httpx.Request) -> bytes:
        if world.pod.asked["/health"] % 3:
            raise httpx.ReadError("cut", request=request)
        return b""

    async with running(watched(world.fleet, world.probes.check)):
        await until(lambda: world.is_in(PodState.READY))
        states: list[PodState] = []
        world.fleet.listen(lambda pod, old, new: states.append(new))
        world.pod.answers["/health"] = flapping
        await until(lambda: world.pod.asked["/health"] > 15)
    assert states == []


async def test_a_description_of_an_earlier_epoch_is_dropped(world: Probing) -> None:
    """The pod restarts while it is described, and is described again."""

    def models(request: httpx.Request) -> bytes:
        if world.pod.asked["/v1/models"] > 1:
            return WELL["/v1/models"]
        world.fleet.restarted("a")
        return b'{"data": [{"id": "former"}]}'

    world.pod.answers["/v1/models"] = models
    async with running(watched(world.fleet, world.probes.check)):
        await until(lambda: world.is_in(PodState.READY))
    assert [(epoch, facts.models) for epoch, _, facts in world.described] == [(world.now.epoch, ("m",))]


async def test_a_port_that_refused_connections_belongs_to_a_new_process(world: Probing) -> None:
    """New epoch, described again, READY only then."""
    async with running(watched(world.fleet, world.probes.check)):
        await until(lambda: world.is_in(PodState.READY))
        world.fleet.trust("a", PrefixTrust.TRUSTED, "")
        world.pod.refuses = True
        await until(lambda: world.is_in(PodState.EJECTED))
        world.pod.answers["/v1/models"] = b'{"data": [{"id": "n"}]}'
        world.pod.refuses = False
        await until(lambda: world.is_in(PodState.READY))
    assert [state for _, state, _ in world.described] == [PodState.JOINING, PodState.EJECTED]
    assert world.described[0][0] < world.described[1][0] == world.now.epoch
    assert (world.now.models, world.now.trust) == (("n",), PrefixTrust.UNTESTED)


async def test_a_pod_serves_on_after_a_restart_that_another_feed_noticed(world: Probing) -> None:
    """The pod is described again only before it is admitted again."""
    async with running(watched(world.fleet, world.probes.check)):
        await until(lambda: world.is_in(PodState.READY))
        world.fleet.restarted("a")
        asked = world.pod.asked["/health"]
        await until(lambda: world.pod.asked["/health"] > asked + 3)
        assert (world.is_in(PodState.READY), len(world.described)) == (True, 1)
        world.fleet.event("a", PodEvent.EJECT)
        await until(lambda: world.is_in(PodState.READY))
    assert world.described[1][0] == world.now.epoch


async def test_another_process_under_the_same_id_is_described(world: Probing) -> None:
    """Discovery assigned the id to another URL between two probes."""
    async with running(watched(world.fleet, world.probes.check)):
        await until(lambda: world.is_in(PodState.READY))
        world.fleet.sync([make_pod("a", url="http://a/other")])
        world.pod.answers |= {f"/other{path}": answer for path, answer in WELL.items()}
        await until(lambda: world.is_in(PodState.READY))
    assert [epoch for epoch, _, _ in world.described][1:] == [world.now.epoch]


async def test_an_ejected_pod_is_not_probed_before_its_backoff_ends(network: Network) -> None:
    """A passed probe must not readmit a pod that fails every request."""
    network["a"].answers |= WELL
    network["b"].answers |= WELL
    world = Probing(network, make_pod("a"), backoff_s=(1e9, 1e9), failures_to_eject=1)
    async with running(watched(world.fleet, world.probes.check)):
        await until(lambda: world.is_in(PodState.READY))
        world.breaker.probe_failed("a", time.monotonic())
        asked = world.pod.asked["/health"]
        world.fleet.sync([world.now, make_pod("b")])
        await until(lambda: network["b"].asked["/health"] > 5)
        assert world.pod.asked["/health"] <= asked + 1
        assert world.is_in(PodState.EJECTED)
        world.breaker.success("a")
        await until(lambda: world.is_in(PodState.READY))


async def test_a_drained_pod_returns_through_a_probe(world: Probing) -> None:
    """Probes do not end the drain; after an undrain the next probe makes it READY."""
    async with running(watched(world.fleet, world.probes.check)):
        await until(lambda: world.is_in(PodState.READY))
        world.fleet.event("a", PodEvent.DRAIN)
        asked = world.pod.asked["/health"]
        await until(lambda: world.pod.asked["/health"] > asked + 2)
        assert world.is_in(PodState.DRAINING)
        world.fleet.event("a", PodEvent.UNDRAIN)
        await until(lambda: world.is_in(PodState.READY))
    assert len(world.described) == 1


FAULTS = "/fault_tolerance/status"


def faults(*statuses: str) -> bytes:
    """As vLLM 0.33 answers with `--enable-fault-tolerance` (read in its source, and in that of 0.32; not run)."""
    engines = [
        {"id": rank, "status": status} | ({} if status == "healthy" else {"fault_info": "RuntimeError"})
        for rank, status in enumerate(statuses)
    ]
    return msgspec.json.encode({"schema_version": 1, "total_engines": len(engines), "engines": engines})


@pytest.mark.parametrize("status", ["unhealthy", "dead"])
async def test_a_healthy_pod_that_reports_a_fault_is_drained_until_it_has_none(status: str, world: Probing) -> None:
    world.pod.answers[FAULTS] = faults("healthy")
    async with running(watched(world.fleet, world.probes.check)):
        await until(lambda: world.is_in(PodState.READY))
        world.pod.answers[FAULTS] = faults(status)
        await until(lambda: world.is_in(PodState.DRAINING))
        assert world.fleet.state_reason("a") == f"the engine reports that rank 0 is {status}: RuntimeError"
        world.pod.statuses[FAULTS] = 500
        asked = world.pod.asked[FAULTS]
        await until(lambda: world.pod.asked[FAULTS] > asked + 3)
        assert world.is_in(PodState.DRAINING), "no answer is no news"
        del world.pod.statuses[FAULTS]
        world.pod.answers[FAULTS] = faults("healthy")
        await until(lambda: world.is_in(PodState.READY))


async def test_a_pod_with_a_fault_does_not_join(world: Probing) -> None:
    world.pod.answers[FAULTS] = faults("unhealthy")
    async with running(watched(world.fleet, world.probes.check)):
        await until(lambda: world.pod.asked[FAULTS] > 3)
        assert world.is_in(PodState.DRAINING)


async def test_the_end_of_an_operators_drain_does_not_admit_a_pod_with_a_fault(world: Probing) -> None:
    """Its rack was drained meanwhile, and the rack's drain has ended."""
    world.pod.answers[FAULTS] = faults("dead")
    async with running(watched(world.fleet, world.probes.check)):
        await until(lambda: world.is_in(PodState.DRAINING))
        world.fleet.event("a", PodEvent.DRAIN)
        world.fleet.event("a", PodEvent.UNDRAIN)
        world.pod.asked[FAULTS] = 0
        await until(lambda: world.pod.asked[FAULTS] > 3)
        assert world.is_in(PodState.DRAINING)


async def test_a_pod_that_an_operator_has_drained_stays_drained_after_a_fault(world: Probing) -> None:
    world.pod.answers[FAULTS] = faults("healthy")
    async with running(watched(world.fleet, world.probes.check)):
        await until(lambda: world.is_in(PodState.READY))
        world.fleet.event("a", PodEvent.DRAIN)
        for answer in (faults("dead"), faults("healthy")):
            world.pod.asked[FAULTS] = 0
            world.pod.answers[FAULTS] = answer
            await until(lambda: world.pod.asked[FAULTS] > 3)
        assert world.is_in(PodState.DRAINING)


async def test_a_pod_that_reports_no_faults_is_asked_for_them_once(world: Probing) -> None:
    """Most engines run without `--enable-fault-tolerance`."""
    async with running(watched(world.fleet, world.probes.check)):
        await until(lambda: world.pod.asked["/health"] > 5)
    assert world.is_in(PodState.READY) and world.pod.asked[FAULTS] == 1


@pytest.mark.parametrize(
    ("answer", "rank", "drains"),
    [
        (faults("healthy", "dead"), None, False),
        (faults("unhealthy", "dead"), None, True),
        (faults("healthy", "dead"), 0, False),
        (faults("healthy", "dead"), 1, True),
        (faults("dead"), 3, False),
        (faults(), None, False),
        (b"[]", None, False),
    ],
)
def test_the_faults_of_ranks_that_a_pod_does_not_need_are_no_fault(
    answer: bytes, rank: int | None, drains: bool
) -> None:
    """Without a rank of its own, its front end can use any that is healthy."""
    assert bool(ENGINES["vllm"].fault(answer, make_pod("a", dp_rank=rank))) == drains
