"""Tenants: who may come in, what each may use, and how much."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from loadtest.commands.child_processes import JSON_CALL
from loadtest.mock_engine.mock_config import MockEngineConfig
from loadtest.mock_engine.mock_engine import running_engines
from router.admission.sharing import TOLERANCE, MeterSharing
from router.feeds import shared_rows
from router.observe.receipts import Explained
from router.prompt.tokenizer import Tokenizer
from router.request import quota_charges
from tests.kit.deadlines import DEADLINE_S
from tests.redis_process import RedisProcess, redis_process
from tests.stores.test_quota_book import stop_the_books_clock
from tests.stories.conftest import Deploy, Deployment
from tests.stories.test_cluster import ClusterDeployment

pytestmark = [pytest.mark.net, pytest.mark.anyio]


# --- keys, models and prefixes ---


MESSAGES: list[dict[str, str]] = [{"role": "user", "content": "Hello"}]
CHAT: dict[str, Any] = {"model": "demo", "messages": MESSAGES, "max_tokens": 2}


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def replace_in(file: Path, old: str, new: str) -> None:
    """Replace a part of the file."""
    file.write_text(file.read_text().replace(old, new))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    """`acme` may use the model and its adapter `lora`, `other` neither, `late` is suspended."""
    file = tmp_path / "tenants.yaml"
    file.write_text(f"""
tenants:
- {{name: acme, keys: [{digest("key-acme")}], models: [demo], adapters: [lora]}}
- {{name: plain, keys: [{digest("key-plain")}], adapters: []}}
- {{name: other, keys: [{digest("key-other")}], models: [another]}}
- {{name: late, keys: [{digest("key-late")}], suspended: true}}
""")
    return file


async def post(deployment: Deployment, key: str, **fields: Any) -> tuple[int, str]:
    """Status and error code of a chat."""
    answer = await deployment.client.post("/v1/chat/completions", json={**CHAT, **fields}, headers=bearer(key))
    return answer.status_code, "" if answer.status_code == 200 else answer.json()["error"]["code"]


async def test_a_request_needs_a_key_of_a_tenant_that_may_use_its_model(deploy: Deploy, tenants: Path) -> None:
    """To a tenant, a model that it may not use does not exist. The tenant header of a client means nothing."""
    async with deploy(1, tenants=tenants, engine={"adapters": ("lora",)}) as deployment:
        found = {key: await post(deployment, f"key-{key}") for key in ("acme", "plain", "other", "late", "unknown")}
        assert found == {
            "acme": (200, ""),
            "plain": (200, ""),
            "other": (404, "model_not_found"),
            "late": (403, "access_denied"),
            "unknown": (401, "invalid_api_key"),
        }
        assert await post(deployment, "key-acme", model="lora") == (200, "")
        assert await post(deployment, "key-plain", model="lora") == (404, "model_not_found")
        hidden = await deployment.client.post("/v1/chat/completions", json=CHAT, headers=bearer("key-other"))
        assert "demo`" in hidden.text and "Models:" not in hidden.text
        without = await deployment.client.post("/v1/chat/completions", json=CHAT, headers={"x-tenant-id": "acme"})
        assert (without.status_code, without.headers["www-authenticate"]) == (401, "Bearer")
        unknown = await deployment.client.post(
            "/v1/chat/completions", json={**CHAT, "model": "lora"}, headers=bearer("key-plain")
        )
        missing = await deployment.client.post(
            "/v1/chat/completions", json={**CHAT, "model": "none"}, headers=bearer("key-plain")
        )
        assert unknown.text.replace("lora", "none") == missing.text


async def test_a_tenant_sees_its_own_models(deploy: Deploy, tenants: Path) -> None:
    """And the models only with a key."""
    expected = {"acme": ["demo", "lora"], "plain": ["demo"], "other": []}
    async with deploy(1, tenants=tenants, engine={"adapters": ("lora",)}) as deployment:
        for name, models in expected.items():
            listed = await deployment.client.get("/v1/models", headers=bearer(f"key-{name}"))
            assert [card["id"] for card in listed.json()["data"]] == models
            one = await deployment.client.get("/v1/models/lora", headers=bearer(f"key-{name}"))
            assert one.status_code == (200 if "lora" in models else 404)
        assert (await deployment.client.get("/v1/models")).status_code == 401
        assert (await deployment.client.get("/livez")).status_code == 200


@pytest.fixture
def policies(tmp_path: Path) -> Path:
    """A policy for `acme`."""
    folder = tmp_path / "policies"
    folder.mkdir()
    (folder / "mine.yaml").write_text(
        "name: mine\nabout: x\nmatch: {tenant: acme}\ncosts:\n  decode: {}\npicker:\n  lowest_cost: {}\n"
    )
    return folder


async def test_a_policy_and_the_metrics_know_the_tenant(deploy: Deploy, tenants: Path, policies: Path) -> None:
    """`match.tenant` of a policy, and the label `tenant`: by its key."""
    async with deploy(1, tenants=tenants, policies=policies) as deployment:
        said = {"x-tenant-id": "acme", "x-workload-class": "batch"}
        answers = [
            await deployment.client.post("/v1/chat/completions", json=CHAT, headers={**bearer(f"key-{name}"), **said})
            for name in ("acme", "plain")
        ]
        assert [answer.headers["x-warmroute-policy"] for answer in answers] == ["mine", "cost_aware"]
        metrics = (await deployment.admin.get("/metrics")).text
        for name in ("acme", "plain"):
            assert f'warmroute_class_requests_total{{class="batch",result="ok",tenant="{name}"}} 1.0' in metrics


async def test_a_revoked_key_stops_while_the_router_runs(deploy: Deploy, tenants: Path) -> None:
    """An invalid file changes nothing, and /readyz of the admin listener names its mistake."""
    async with deploy(1, tenants=tenants) as deployment:
        assert await post(deployment, "key-acme") == (200, "")
        replace_in(tenants, "\n- {name: acme", "\n- {name: plain}\n- {name: acme")

        async def is_reported() -> bool:
            return "duplicate tenant" in (await deployment.admin.get("/readyz")).text

        await deployment.until(is_reported)
        assert await post(deployment, "key-acme") == (200, "")
        replace_in(tenants, "- {name: plain}\n", "")
        replace_in(tenants, digest("key-acme"), digest("key-new"))

        async def is_revoked() -> bool:
            return await post(deployment, "key-acme") == (401, "invalid_api_key")

        await deployment.until(is_revoked)
        assert await post(deployment, "key-new") == (200, "")
        assert not await is_reported()


LONG = [{"role": "user", "content": "the same words " * 100}]


@pytest.fixture
def sharing(tmp_path: Path) -> Path:
    """`one` and `two` share prefixes, `alone` does not."""
    file = tmp_path / "tenants.yaml"
    entries = (f"{{name: {name}, keys: [{digest(f'key-{name}')}], share: team}}" for name in ("one", "two"))
    file.write_text(f"tenants: [{', '.join(entries)}, {{name: alone, keys: [{digest('key-alone')}]}}]")
    return file


PLACES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": LONG},
    "/v1/completions": {"prompt": LONG[0]["content"]},
    "/v1/messages": {"messages": LONG},
    "/v1/responses": {"input": LONG, "max_output_tokens": 2, "store": False},
}


def cached_tokens(usage: dict[str, Any]) -> int:
    """As the engine reports them, in any API."""
    for details in ("prompt_tokens_details", "input_tokens_details"):
        if details in usage:
            return int(usage[details]["cached_tokens"])
    return int(usage["cache_read_input_tokens"])


@pytest.mark.parametrize("path", PLACES)
async def test_prefixes_are_shared_inside_a_group_only(deploy: Deploy, sharing: Path, path: str) -> None:
    """One prompt of three tenants, on two pods. Neither engine nor router finds another tenant's blocks; the headers of
    a response say what the router expected."""
    async with deploy(2, tenants=sharing) as deployment:
        body = {"model": "demo", **PLACES[path]} | ({} if "responses" in path else {"max_tokens": 2})
        found: dict[str, list[tuple[bool, ...]]] = {}
        for name in ("one", "alone", "two", "alone"):
            answer = await deployment.client.post(path, json=body, headers=bearer(f"key-{name}"))
            assert answer.status_code == 200, answer.text
            hits = cached_tokens(answer.json()["usage"]), int(answer.headers["x-warmroute-cached-tokens"])
            found.setdefault(name, []).append(tuple(bool(hit) for hit in hits))
            await deployment.apply_events()
        assert found["one"] == [(False, False)] and found["two"] == [(True, True)]
        assert found["alone"] == [(False, False), (True, True)]


async def test_an_operator_previews_on_behalf_of_a_tenant(deploy: Deploy, sharing: Path) -> None:
    """Its own prefixes are found, others are not. The tenant is named in the call, or in `edge.tenant_header`."""
    async with deploy(1, tenants=sharing) as deployment:
        body = {"model": "demo", "messages": LONG, "max_tokens": 2}
        await deployment.client.post("/v1/chat/completions", json=body, headers=bearer("key-one"))
        await deployment.apply_events()
        found = {}
        for name in ("one", "two", "alone"):
            answer = await deployment.admin.post(f"/admin/preview?tenant={name}", json=body)
            same = await deployment.admin.post("/admin/preview", json=body, headers={"x-tenant-id": name})
            assert answer.status_code == same.status_code == 200
            found[name] = (
                msgspec.json.decode(answer.content, type=Explained).explanation.columns[0].plan.cached_tokens > 0
            )
        assert found == {"one": True, "two": True, "alone": False}
        unknown = await deployment.admin.post("/admin/preview", json=body)
        assert unknown.status_code == 400 and "--tenant" in unknown.text


# --- quotas ---


CLIENT = {"authorization": "Bearer key-acme"}


@pytest.fixture
def with_quotas(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a file with the tenant `acme` and these quotas."""

    def write(quotas: str) -> Path:
        file = tmp_path / "tenants.yaml"
        digest = sha256(b"key-acme").hexdigest()
        file.write_text(f"tenants:\n- {{name: acme, keys: [{digest}], quotas: [{quotas}]}}\n")
        return file

    return write


async def chat(client: httpx.AsyncClient, text: str = "Hello", **fields: object) -> httpx.Response:
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}
    return await client.post("/v1/chat/completions", json=body, headers=CLIENT)


def limits_in(answer: httpx.Response, prefix: str = "x-ratelimit-") -> dict[str, str]:
    return {name.removeprefix(prefix): value for name, value in answer.headers.items() if name.startswith(prefix)}


async def test_an_openai_client_sees_its_limits_and_when_to_retry(
    deploy: Deploy, with_quotas: Callable[[str], Path]
) -> None:
    """In headers of answers and of the 429, which its SDK understands."""
    file = with_quotas("{requests_per_minute: 2, output_tokens_per_minute: 1000}")
    async with deploy(1, tenants=file) as deployment:
        first = limits_in(await chat(deployment.client))
        assert first.items() >= {"limit-requests": "2", "remaining-requests": "1", "limit-tokens": "1000"}.items()
        assert first["remaining-tokens"] == "996" and first["reset-requests"] == "1m1s"
        second = limits_in(await chat(deployment.client))
        assert (second["remaining-requests"], second["remaining-tokens"]) == ("0", "992")
        refused = await chat(deployment.client)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["type"]) == (429, "rate_limit_exceeded", "requests")
        assert 55 <= int(refused.headers["retry-after"]) <= 61
        assert limits_in(refused)["remaining-requests"] == "0"
        async with openai.AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="key-acme", max_retries=0) as client:
            with pytest.raises(openai.RateLimitError):
                await client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hi"}])
        text = (await deployment.admin.get("/metrics", headers=JSON_CALL)).text
        assert 'warmroute_quota_refusals_total{limit="requests",tenant="acme"} 2.0' in text


async def test_an_unknown_id_of_a_response_counts_as_a_request(
    deploy: Deploy, with_quotas: Callable[[str], Path]
) -> None:
    """So its tenant cannot search for others."""
    async with deploy(2, tenants=with_quotas("{requests_per_minute: 3}")) as deployment:
        asked = [await deployment.client.get(f"/v1/responses/resp_{n}", headers=CLIENT) for n in range(5)]
    assert [answer.status_code for answer in asked] == [404, 404, 404, 429, 429]


@pytest.fixture
def redis() -> Iterator[RedisProcess]:
    with redis_process() as server:
        yield server


@pytest.fixture
async def fleet(
    redis: RedisProcess,
    with_quotas: Callable[[str], Path],
    tokenizer: Tokenizer,
    engine_config: Callable[..., MockEngineConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[list[Deployment]]:
    """Three routers with a quota of 300 requests a minute, which know of each other. None gives up the others, or its
    requests, because the machine is slow: they would have local shares before the test takes Redis away."""
    stop_the_books_clock(monkeypatch)
    for module, name in ((shared_rows, "MAX_EXCHANGE_S"), (shared_rows, "MAX_WAIT_S"), (quota_charges, "MAX_WAIT_S")):
        monkeypatch.setattr(module, name, DEADLINE_S)
    file = with_quotas("{requests_per_minute: 300}")
    async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
        engines = await stack.enter_async_context(running_engines([engine_config()]))
        cluster = ClusterDeployment(engines, redis, tokenizer, stack, tenants=str(file))
        found = [await cluster.router() for _ in range(3)]
        for one in found:
            await one.until(lambda one=one: one.ready() == 1 and sharing_of(one).members == 3)
        yield found


def sharing_of(one: Deployment) -> MeterSharing:
    sharing = one.program.access.quotas.sharing
    assert sharing is not None
    return sharing


async def served_of(found: list[Deployment], requests: int) -> int:
    """How many of `requests` at each router are served, 8 at a time. All others are refused with 429."""

    async def client(one: Deployment) -> list[int]:
        return [(await chat(one.client, max_tokens=1)).status_code for _ in range(requests // 8)]

    answers = await asyncio.gather(*(client(one) for one in found for _ in range(8)))
    statuses = [status for answer in answers for status in answer]
    assert set(statuses) <= {200, 429}
    return statuses.count(200)


async def test_three_routers_keep_a_quota_together(fleet: list[Deployment]) -> None:
    """A flood at all of them at once: at most 2 % more, and hardly less. Where a busy machine made one of them miss an
    exchange, it used its local share, as without Redis."""
    served = await served_of(fleet, 200)
    has_lost = any(sharing_of(one).was_lost for one in fleet)
    assert 300 * 0.98 <= served <= 300 * (1 + TOLERANCE * (1 + has_lost))
