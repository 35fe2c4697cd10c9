"""The endpoints of the admin listener: readiness, metrics and admin calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from loadtest.commands.child_processes import JSON_CALL
from router.config.load import shipped
from router.config.pod_schema import PodConfig
from router.config.policy_files import PolicyFolder, load_policies
from router.config.schema import Limits
from router.errors import ConfigError
from router.feeds.discovery.membership import Membership
from router.feeds.kv_zmq import KvStreams
from router.feeds.policy_feed import PolicyFeed
from router.fleet.drains import Drains
from router.fleet.fleet import Fleet, PodEvent
from router.fleet.ledger import Ledger
from router.fleet.scaling import Scaling, ScalingView
from router.frontends.admin.admin import AdminRoutes, ExplainRoutes, admin_app
from router.frontends.admin.lora_adapters import LoraAdapters
from router.frontends.admin.page_snapshot import SnapshotStream
from router.frontends.admin.views import MetricsPage, WithoutPods, describe_pods, describe_readiness
from router.frontends.http.upstream import UpstreamPools
from router.observe.changes import Changes
from router.observe.declared import of_process
from router.observe.ended import RecordedDecision
from router.observe.metrics import Metrics
from router.observe.receipts import Explained, explained
from router.policy.calibration import Calibration
from router.policy.calibrator import Calibrator
from router.request.inbound import HeaderList
from router.stores.prefix_store import LocalStore
from router.types import Endpoint, InferenceRequest, Links, PodId, PodLoad
from tests.kit import scenes
from tests.kit.scenes import make_pod
from tests.observe.test_receipts import kept

pytestmark = pytest.mark.anyio
POD = make_pod("a", models=("m",), adapters=("lora",), max_model_len_tokens=9)
SMALL = make_pod("b", engine="sglang", models=("m", "n"), max_model_len_tokens=7)
BASE = "name: mine\nabout: x\npicker:\n  lowest_cost: {}\n"


class Published(LocalStore):
    """A store in which a publisher writes the blocks of pod b."""

    def is_published(self, pod: PodId, now_s: float) -> bool:
        return pod == "b"


class Router:
    """A router without feeds and without a proxy."""

    def __init__(self, policies: Path) -> None:
        self.fleet = Fleet()
        self.fleet.sync([POD, SMALL])
        self.metrics = Metrics()
        self.policies = PolicyFeed(PolicyFolder(policies, "mine", frozenset()), self.metrics)
        self.added: list[PodConfig] = []
        self.drains = Drains()
        self.decision = kept()
        self.previewed: list[tuple[InferenceRequest, HeaderList]] = []
        store = Published()
        streams = KvStreams(self.fleet, store, self.metrics.kv)
        calibrator = Calibrator(Calibration(), self.metrics, Links())
        scaling = ScalingView(self.fleet, Ledger(), Scaling(), 12.0, 0.0)
        page = MetricsPage(self.metrics, self.fleet, Ledger(), store, calibrator, scaling, self._observe_cluster)
        self.is_stopping = False
        self.changes = Changes()
        self.routes = routes = AdminRoutes(
            self.fleet,
            self.policies,
            cast(Membership, self),
            ExplainRoutes(self._find, self._read, self._preview),
            partial(describe_pods, page, streams),
            self._share_drains,
            self.changes.latest,
            lambda: describe_readiness(self.fleet, self.policies, {}, is_stopping=self.is_stopping),
            page.render,
            SnapshotStream(self._no_snapshot),
            LoraAdapters(self.fleet, UpstreamPools(Limits()).of),
        )
        self.app = admin_app(routes)

    async def _no_snapshot(self) -> bytes:
        return b"{}"

    def _observe_cluster(self, metrics: Metrics) -> None:
        metrics[of_process.REPLICAS].set(17)

    def add(self, pod: PodConfig) -> None:
        if "bad" in pod.url:
            raise ConfigError("duplicate id")
        self.added.append(pod)

    def remove(self, pod_id: PodId) -> bool:
        return pod_id == "a"

    async def _share_drains(self) -> str:
        for status in self.fleet.snapshot.pods:
            event = PodEvent.DRAIN if self.drains.reason(status.pod) else PodEvent.UNDRAIN
            self.fleet.event(status.pod.id, event)
        return "all routers"

    def _find(self, request_id: str) -> Explained | None:
        return explained(self.decision) if request_id == "here" else None

    async def _read(
        self, endpoint: Endpoint, named: Mapping[bytes, bytes], body: bytes, request_id: str
    ) -> InferenceRequest:
        return scenes.request(request_id, endpoint=endpoint, model=named[b"x-model"].decode(), body=body)

    async def _preview(self, request: InferenceRequest, headers: HeaderList) -> RecordedDecision:
        self.previewed.append((request, headers))
        return self.decision

    async def call(self, method: str, path: str, *, host: str = "127.0.0.1", **more: Any) -> httpx.Response:
        transport = httpx.ASGITransport(cast(Any, self.app), client=(host, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=JSON_CALL) as client:
            return await client.request(method, path, **more)


@pytest.fixture
def router(tmp_path: Path) -> Router:
    (tmp_path / "mine.yaml").write_text(BASE)
    return Router(tmp_path)


def error_of(answer: httpx.Response) -> Any:
    """The OpenAI error object."""
    return answer.json()["error"]


async def test_a_router_is_ready_with_a_ready_pod_until_it_stops(router: Router) -> None:
    """The answer has the pods by state and the policies."""
    answer = await router.call("GET", "/readyz")
    assert (answer.status_code, answer.json()["status"]) == (503, "no pod is ready")
    assert answer.json()["pods"] == {"joining": 2}
    router.fleet.event("a", PodEvent.PROBE_OK)
    answer = await router.call("GET", "/readyz")
    assert (answer.status_code, answer.json()["status"]) == (200, "ready")
    assert answer.json()["pods"] == {"joining": 1, "ready": 1}
    assert answer.json()["policies"] == {"version": router.policies.current().version}
    router.is_stopping = True
    answer = await router.call("GET", "/readyz")
    assert (answer.status_code, answer.json()["status"]) == (503, "stopping")


def test_a_router_with_providers_is_ready_once_no_pod_may_be_about_to_be(router: Router) -> None:
    """So a restart sends them nothing that pods could serve, and load balancers go on when all pods are down."""

    def is_ready(without_pods: WithoutPods = WithoutPods.LEAVE) -> bool:
        fleet, policies, is_stopping = router.fleet, router.policies, router.is_stopping
        return describe_readiness(fleet, policies, {}, without_pods, is_stopping=is_stopping)[0]

    assert not is_ready()
    for pod in "ab":
        router.fleet.explain_state(pod, "connection refused")
    assert is_ready() and not is_ready(WithoutPods.FAIL)
    router.is_stopping = True
    assert not is_ready()


async def test_callers_without_a_token_get_the_status_alone(router: Router) -> None:
    """Where callers need one. Of everybody, `/livez` only says that the process is alive."""
    router.app = admin_app(replace(router.routes, has_tokens=True))
    assert (await router.call("GET", "/livez")).json() == {"status": "alive"}
    answer = await router.call("GET", "/readyz")
    assert (answer.status_code, answer.json()) == (503, {"status": "not ready"})
    router.fleet.event("a", PodEvent.PROBE_OK)
    assert (await router.call("GET", "/readyz")).json() == {"status": "ready"}
    assert "pods" in (await router.call("GET", "/readyz", headers={"authorization": "Bearer x"})).json()


async def test_invalid_policy_files_are_shown(router: Router, tmp_path: Path) -> None:
    """By /readyz, by the list of policies and by the reload; the last valid ones stay active."""
    (tmp_path / "mine.yaml").write_text(BASE + "colour: red\n")
    answer = await router.call("POST", "/admin/policies/reload")
    assert answer.status_code == 400 and "mine.yaml:5: colour" in error_of(answer)["message"]
    assert "colour" in (await router.call("GET", "/readyz")).json()["policies"]["error"]
    shown = (await router.call("GET", "/admin/policies")).json()
    assert "colour" in shown["error"] and [policy["name"] for policy in shown["active"]] == ["mine"]


async def test_policies_are_reloaded_and_shown(router: Router, tmp_path: Path) -> None:
    """With everything they decide by."""
    assert (await router.call("POST", "/admin/policies/reload")).json()["changed"] is False
    (tmp_path / "canary.yaml").write_text(
        "name: canary\nabout: x\nextends: cost_aware\nmatch: {stream: true}\npercent: 5\n"
    )
    done = (await router.call("POST", "/admin/policies/reload")).json()
    assert done["changed"] is True and done["version"] == router.policies.current().version
    shown = (await router.call("GET", "/admin/policies")).json()
    assert (shown["version"], shown["error"]) == (done["version"], None)
    by_name = {policy["name"]: policy for policy in shown["active"]}
    assert (by_name["mine"]["default"], by_name["canary"]["default"]) == (True, False)
    canary = by_name["canary"]
    assert (canary["match"], canary["percent"]) == ({"stream": True}, 5)
    assert by_name["mine"]["match"] is None
    shipped_costs = {name: term.model_dump() for name, term in load_policies(shipped("policies"))["cost_aware"].costs}
    assert canary["costs"] == shipped_costs
    assert canary["picker"] == {"lowest_cost": {"indifference_ms": 1.0}}
    (tmp_path / "mine.yaml").write_text(BASE + "filters:\n  max_waiting: {requests: 5}\n")
    await router.call("POST", "/admin/policies/reload")
    shown = (await router.call("GET", "/admin/policies")).json()
    assert [policy["filters"] for policy in shown["active"] if policy["name"] == "mine"] == [
        {"max_waiting": {"requests": 5, "strict": False}}
    ]


async def test_metrics_are_read_when_they_are_rendered(router: Router) -> None:
    """Those of the fleet, of the calibration and of the cluster."""
    router.fleet.observe_load("a", PodLoad(running=3, waiting=2, kv_usage=0.5))
    answer = await router.call("GET", "/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'warmroute_pod_state{pod="a",state="joining"} 1.0' in answer.text
    assert "warmroute_other_replicas 17.0" in answer.text


async def test_pods_are_shown_with_state_and_load(router: Router) -> None:
    """And the source of what is known about their caches."""
    router.fleet.observe_load("a", PodLoad(running=3, waiting=2, kv_usage=0.5))
    first, second = (await router.call("GET", "/admin/pods")).json()
    assert (first["id"], first["url"], first["engine"], first["state"]) == ("a", "http://a", "vllm", "joining")
    assert (first["running"], first["waiting"], first["kv_usage"], first["in_flight"]) == (3, 2, 0.5, 0)
    assert (first["models"], first["adapters"], first["max_model_len_tokens"]) == (["m"], ["lora"], 9)
    assert (first["kv_events"], second["kv_events"]) == ("none", "published")


async def test_pods_are_added(router: Router) -> None:
    """A pod that is invalid, or contradicts the others, is refused."""
    answer = await router.call("POST", "/admin/pods", json={"url": "http://c", "engine": "sglang"})
    assert (answer.status_code, answer.json()) == (201, {"status": "joining", "url": "http://c"})
    assert [(pod.url, pod.engine) for pod in router.added] == [("http://c", "sglang")]
    answer = await router.call("POST", "/admin/pods", json={"url": "http://bad"})
    assert (answer.status_code, error_of(answer)["message"]) == (400, "duplicate id")


@pytest.mark.parametrize("path", ["/admin/pods", "/v1/load_lora_adapter"])
async def test_a_command_with_many_fields_is_refused(router: Router, path: str) -> None:
    """Each unknown field would be a mistake with a suggestion; how long it takes: `tests/bench/cpu_bounds.py`."""
    answer = await router.call("POST", path, json={f"k{number}": 1 for number in range(2000)})
    assert answer.status_code == 400 and len(answer.content) < 1000


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ({"url": "secret"}, "url"),
        ({"url": "http://c", "socket": "secret"}, "socket"),
        ({"url": "http://c", "speed": {"c0_ms": "secret"}}, "speed.c0_ms"),
        ({"url": "http://c", "colour": "secret"}, "colour"),
        ({"url": "http://c", "x" * 5000: "secret"}, "..."),
        ({"id": "secret"}, "url"),
        (["secret"], None),
    ],
)
async def test_an_invalid_pod_is_refused_with_its_key_and_without_its_values(
    router: Router, body: object, key: str | None
) -> None:
    """400 in OpenAI's shape. Values may be secrets."""
    answer = await router.call("POST", "/admin/pods", json=body)
    assert (answer.status_code, error_of(answer)["type"]) == (400, "invalid_request_error")
    assert error_of(answer)["param"] == key and error_of(answer)["message"].startswith(key or "The request body")
    assert "secret" not in answer.text and len(answer.content) < 1000
    assert "Value error" not in answer.text
    assert not router.added


async def test_a_misspelt_key_of_a_pod_comes_with_the_nearest_one(router: Router) -> None:
    """As in router.yaml, and not only that another key is missing."""
    answer = await router.call("POST", "/admin/pods", json={"urll": "secret", "engnie": "secret"})
    message = error_of(answer)["message"]
    assert "urll: unknown key; did you mean 'url'?" in message
    assert "engnie: unknown key; did you mean 'engine'?" in message
    assert answer.status_code == 400 and "secret" not in answer.text


async def test_a_body_that_is_not_json_is_refused(router: Router) -> None:
    answer = await router.call("POST", "/admin/pods", content=b'{"url": "secret')
    assert answer.status_code == 400 and "JSON" in error_of(answer)["message"] and "secret" not in answer.text


async def test_pods_are_removed(router: Router) -> None:
    """Ids may contain slashes."""
    answer = await router.call("DELETE", "/admin/pods/a")
    assert (answer.status_code, answer.json()) == (200, {"status": "gone", "pod": "a"})
    answer = await router.call("DELETE", "/admin/pods/no/body")
    assert answer.status_code == 404 and "no/body" in error_of(answer)["message"]


async def test_pods_are_drained_and_undrained(router: Router) -> None:
    """An undrained pod joins again."""
    answer = await router.call("POST", "/admin/pods/a/drain")
    expected = {"status": "draining", "pod": "a", "pods": {"a": "draining"}, "known_to": "all routers"}
    assert answer.json() == expected
    answer = await router.call("POST", "/admin/pods/a/undrain")
    assert answer.json() == expected | {"status": "joining", "pods": {"a": "joining"}}
    assert (await router.call("POST", "/admin/pods/nobody/drain")).status_code == 404


async def test_pods_are_drained_by_their_labels(router: Router) -> None:
    """With who and why; unknown labels, and drains that are not in force, are named."""
    said = {"by": "ada", "why": "new power supply", "more": 1}
    answer = await router.call("POST", "/admin/pods/role=both,engine=sglang/drain", json=said)
    assert answer.json()["pods"] == {"b": "draining"}
    found = router.drains.current["engine=sglang,role=both"]
    assert (found.by, found.why) == ("ada", "new power supply") and found.at_s > 1.7e9
    answer = await router.call("POST", "/admin/pods/engine=vllm/undrain")
    assert answer.status_code == 404 and "in force: engine=sglang,role=both" in error_of(answer)["message"]
    assert (await router.call("POST", "/admin/pods/engine=sglang,role=both/undrain")).json()["pods"] == {"b": "joining"}
    answer = await router.call("POST", "/admin/pods/rak=r12/drain")
    assert answer.status_code == 400 and "host, rack, zone" in error_of(answer)["message"]
    long = await router.call("POST", "/admin/pods/rack=r12/drain", json={"why": "x" * 9999, "by": ["y" * 9999]})
    assert long.json()["pods"] == {} and len(str(router.drains.current["rack=r12"])) < 400


async def test_decisions_are_explained(router: Router) -> None:
    found = (await router.call("GET", "/admin/explain/here")).json()
    assert found["receipt"]["id"] == router.decision.scene.request_id
    answer = await router.call("GET", "/admin/explain/nowhere")
    assert answer.status_code == 404 and "nowhere" in error_of(answer)["message"]
    assert "or an error answered it without one" in error_of(answer)["message"]


async def test_a_decision_is_previewed(router: Router) -> None:
    """As for a chat request with these headers."""
    answer = await router.call("POST", "/admin/preview", content=b"0123456789", headers={"x-model": "m"})
    assert "receipt" in answer.json()
    ((request, headers),) = router.previewed
    assert (request.endpoint, request.model, request.body) == (Endpoint.CHAT, "m", b"0123456789")
    assert request.id.startswith("preview-") and (b"x-model", b"m") in headers


async def test_unknown_paths_and_methods_have_openai_errors(router: Router) -> None:
    """404 and 405."""
    answer = await router.call("GET", "/nowhere")
    assert (answer.status_code, error_of(answer)["code"]) == (404, "unknown_url")
    assert "This listener has /ui, /metrics, /livez, /readyz, /admin/pods" in error_of(answer)["message"]
    answer = await router.call("POST", "/metrics")
    assert (answer.status_code, error_of(answer)["code"]) == (405, "method_not_allowed")
    assert error_of(answer)["message"] == "/metrics does not support POST."
