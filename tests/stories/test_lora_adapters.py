"""An operator loads and unloads LoRA adapters on all pods of a model, through the admin listener."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from router.feeds import probe
from tests.stories.conftest import Deploy, Deployment

pytestmark = [pytest.mark.net, pytest.mark.anyio]

LORA = {"lora_name": "sql", "lora_path": "/adapters/sql"}


async def _change(deployment: Deployment, what: str, **fields: Any) -> httpx.Response:
    return await deployment.admin.post(f"/v1/{what}_lora_adapter", json={**LORA, **fields})


async def _directly(deployment: Deployment, what: str) -> None:
    """On the first engine, without the router."""
    async with httpx.AsyncClient(base_url=deployment.engines[0].url) as engine:
        (await engine.post(f"/v1/{what}_lora_adapter", json=LORA)).raise_for_status()


def _pods(deployment: Deployment) -> list[str]:
    return [status.pod.id for status in deployment.program.fleet.snapshot.pods]


async def test_all_pods_load_and_unload_an_adapter(deploy: Deploy) -> None:
    """Clients can use it as soon as the answer is there, and no longer than until it is unloaded."""
    async with deploy(pods=2) as deployment:
        loaded = await _change(deployment, "load")
        assert (loaded.status_code, loaded.json()) == (200, {"pods": dict.fromkeys(_pods(deployment), "loaded")})
        used = await deployment.chat([{"role": "user", "content": "Hi"}], model="sql")
        assert used.status_code == 200
        again = await _change(deployment, "load")
        assert (again.status_code, set(again.json()["pods"].values())) == (200, {"already loaded"})
        unloaded = await _change(deployment, "unload", model="demo")
        assert (unloaded.status_code, set(unloaded.json()["pods"].values())) == (200, {"unloaded"})
        gone = await deployment.chat([{"role": "user", "content": "Hi"}], model="sql")
        assert gone.status_code == 404


async def test_a_partial_failure_names_each_pod_and_is_repeatable(deploy: Deploy) -> None:
    """One engine has the adapter already, which the router does not know: vLLM refuses to load it twice."""
    async with deploy(pods=2) as deployment:
        await _directly(deployment, "load")
        first, second = _pods(deployment)
        partly = await _change(deployment, "load")
        assert partly.status_code == 502
        assert partly.json()["error"]["code"] == "adapter_not_on_all_pods"
        answers = partly.json()["pods"]
        assert sorted(answers) == sorted([first, second])
        assert sorted(answer.partition(":")[0] for answer in answers.values()) == ["loaded", "status 400"]
        repeated = await _change(deployment, "load", load_inplace=True)
        assert set(repeated.json()["pods"].values()) == {"loaded"}
        assert all("sql" in status.pod.adapters for status in deployment.program.fleet.snapshot.pods)


async def test_adapters_that_others_load_are_found(deploy: Deploy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another router, or the operator on the pod itself."""
    monkeypatch.setattr(probe, "ADAPTERS_INTERVAL_S", 0.05)
    async with deploy(pods=1) as deployment:
        await _directly(deployment, "load")
        await deployment.until(lambda: deployment.ready("sql") == 1)
        await _directly(deployment, "unload")
        await deployment.until(lambda: deployment.ready("sql") == 0)


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"lora_name": ""}, 400, "`lora_name` must be a string"),
    ({"lora_name": "demo"}, 400, "the name of a model"),
    ({"model": "other"}, 404, "No pod serves the model `other`"),
]


async def test_what_is_refused_reaches_no_pod(deploy: Deploy) -> None:
    """With the reason."""
    async with deploy(pods=1) as deployment:
        for fields, status, what in REFUSED:
            refused = await _change(deployment, "load", **fields)
            assert refused.status_code == status
            assert what in refused.json()["error"]["message"]
            assert "pods" not in refused.json()


async def test_an_engine_without_adapters_is_refused(deploy: Deploy) -> None:
    """llama.cpp loads adapters at its start alone."""
    reach = {"engine": "llamacpp"}
    async with deploy(pods=1, reach=lambda engine: {"url": engine.url, **reach}, wait=False) as deployment:
        await deployment.until(lambda: deployment.ready() == 1)
        refused = await _change(deployment, "load")
        assert refused.status_code == 400
        assert "(llamacpp) loads no adapters at run time" in refused.json()["error"]["message"]
