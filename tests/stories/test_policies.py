"""Policy files are reloaded under load, and errors in them have no effect on routing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from router.feeds import policy_feed
from tests.kit.deadlines import DEADLINE_S
from tests.stories.conftest import Chat, Deploy, Deployment

pytestmark = [pytest.mark.net, pytest.mark.anyio]

DEFAULT = "name: mine\nabout: x\nextends: cost_aware\ncosts:\n  eviction:\n    reuse: {reuse}\n"


def chat(number: int) -> Chat:
    return [{"role": "user", "content": f"the harbour {number} " * 60}]


def default(reuse: float = 1.5) -> str:
    return DEFAULT.format(reuse=reuse)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one policy."""
    (tmp_path / "mine.yaml").write_text(default())
    return tmp_path


@pytest.fixture
def only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router does not look at its files by itself: on a slow machine it would be faster than a call that follows."""
    monkeypatch.setattr(policy_feed, "INTERVAL_S", DEADLINE_S)


@asynccontextmanager
async def under_load(deployment: Deployment) -> AsyncIterator[list[httpx.Response]]:
    """Send requests all the time, four at once; yields the list of responses."""
    answers: list[httpx.Response] = []

    async def row(first: int) -> None:
        while True:
            answers.append(await deployment.chat(chat(first + len(answers) % 3)))

    rows = [asyncio.create_task(row(number)) for number in range(4)]
    try:
        yield answers
    finally:
        for one in rows:
            one.cancel()
        await asyncio.gather(*rows, return_exceptions=True)


def version(deployment: Deployment) -> str:
    return deployment.program.policies.current().version


async def metric(deployment: Deployment, name: str) -> str:
    text = (await deployment.admin.get("/metrics")).text
    return next(line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(name))


async def test_an_edited_policy_applies_by_itself_and_no_request_fails(deploy: Deploy, folder: Path) -> None:
    """Under load: the next decisions use the new policy with the new number."""
    async with deploy(policy="mine", policies=folder) as deployment, under_load(deployment) as answers:
        await deployment.until(lambda: len(answers) > 20)
        before = deployment.program.policies.current().default
        (folder / "mine.yaml").write_text(default(reuse=7.0))
        await deployment.until(lambda: deployment.program.policies.current().default.version != before.version)
        now = dict(deployment.program.policies.current().default.costs)
        assert repr(now["eviction"]) == "EvictionTerm(reuse=7.0, learnt=2.0, congestion=2.0)"
        asked = len(answers)
        await deployment.until(lambda: len(answers) > asked + 20)
        assert {answer.status_code for answer in answers} == {200}


async def test_an_invalid_file_only_sets_a_metric_and_an_error_with_its_line(deploy: Deploy, folder: Path) -> None:
    """/readyz reports file and line and stays ready; the corrected file is loaded."""
    async with deploy(policy="mine", policies=folder) as deployment, under_load(deployment) as answers:
        good = version(deployment)
        (folder / "mine.yaml").write_text(default().replace("eviction", "evicton"))
        await deployment.until(lambda: bool(deployment.program.policies.error))
        assert version(deployment) == good
        assert await metric(deployment, "warmroute_policy_reload_failed") == "1.0"
        ready = await deployment.admin.get("/readyz")
        assert ready.status_code == 200
        assert "mine.yaml:5: costs.evicton: unknown key; did you mean 'eviction'?" in ready.json()["policies"]["error"]
        (folder / "mine.yaml").write_text(default(reuse=2.0))
        await deployment.until(lambda: version(deployment) != good)
        assert await metric(deployment, "warmroute_policy_reload_failed") == "0.0"
        assert "error" not in (await deployment.admin.get("/readyz")).json()["policies"]
        assert {answer.status_code for answer in answers} == {200}


@pytest.mark.usefixtures("only_when_asked")
async def test_sighup_and_an_admin_call_reload_at_once(deploy: Deploy, folder: Path) -> None:
    """The call returns the result, or the error with file and line."""
    async with deploy(policy="mine", policies=folder) as deployment:
        answer = await deployment.admin.post("/admin/policies/reload")
        assert answer.json() == {"version": version(deployment), "changed": False, "review": None}
        (folder / "mine.yaml").write_text("name: [\n")
        answer = await deployment.admin.post("/admin/policies/reload")
        assert answer.status_code == 400
        assert "mine.yaml:" in answer.json()["error"]["message"]
        (folder / "mine.yaml").write_text(default(reuse=9.0))
        os.kill(os.getpid(), signal.SIGHUP)
        await deployment.until(lambda: not deployment.program.policies.error)
        shown = (await deployment.admin.get("/admin/policies")).json()
        assert shown["active"][0]["costs"]["eviction"] == {"reuse": 9.0, "learnt": 2.0, "congestion": 2.0}
        assert shown["error"] is None
