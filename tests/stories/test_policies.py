"""Can the platform team change routing by editing a file, and can it break anything by that?"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from router.sim.mock_engine import Fault, FaultKind
from tests.stories.conftest import Chat, City, OpenCity

pytestmark = [pytest.mark.net, pytest.mark.anyio]

TURNS = "name: {name}\nabout: x\nmatch: {match}\npicker:\n  in_turn: {{}}\n"
DEFAULT = "name: mine\nabout: x\nextends: cost_aware\ncosts:\n  eviction:\n    reuse: {reuse}\n"


def chat(number: int) -> Chat:
    return [{"role": "user", "content": f"the harbour {number} " * 60}]


def default(reuse: float = 1.5) -> str:
    return DEFAULT.format(reuse=reuse)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of one policy."""
    (tmp_path / "mine.yaml").write_text(default())
    return tmp_path


@asynccontextmanager
async def under_load(city: City) -> AsyncIterator[list[httpx.Response]]:
    """Requests all the while, one after another in four rows; yields the answers as they come."""
    answers: list[httpx.Response] = []

    async def row(first: int) -> None:
        while True:
            answers.append(await city.chat(chat(first + len(answers) % 3)))

    rows = [asyncio.create_task(row(number)) for number in range(4)]
    try:
        yield answers
    finally:
        for one in rows:
            one.cancel()
        await asyncio.gather(*rows, return_exceptions=True)


def version(city: City) -> str:
    return city.program.policies.current().version


async def metric(city: City, name: str) -> str:
    text = (await city.client.get("/metrics")).text
    return next(line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(name))


async def test_one_edited_number_decides_within_a_second_and_no_request_fails(
    open_city: OpenCity, folder: Path
) -> None:
    """Under load: the next decisions are the new policy's, priced with the new number."""
    async with open_city(policy="mine", policies=folder) as city, under_load(city) as answers:
        await city.until(lambda: len(answers) > 20)
        before = city.program.policies.current().default
        at_s = asyncio.get_running_loop().time()
        (folder / "mine.yaml").write_text(default(reuse=7.0))
        await city.until(lambda: city.program.policies.current().default.version != before.version)
        assert asyncio.get_running_loop().time() - at_s < 1.0
        now = dict(city.program.policies.current().default.costs)
        assert repr(now["eviction"]) == "EvictionTerm(reuse=7.0)"
        asked = len(answers)
        await city.until(lambda: len(answers) > asked + 20)
        assert {answer.status_code for answer in answers} == {200}


async def test_a_reload_says_what_it_would_have_changed(open_city: OpenCity, folder: Path) -> None:
    """Under load: tried on the last decisions, in the answer to the call and in the log."""
    async with open_city(policy="mine", policies=folder) as city, under_load(city) as answers:
        await city.until(lambda: len(answers) > 20)
        (folder / "mine.yaml").write_text(TURNS.format(name="mine", match="null"))
        with capture_logs() as lines:
            told = (await city.client.post("/admin/policies/reload")).json()
            await city.until(lambda: any(line["event"] == "policies reloaded" for line in lines))
        found = re.fullmatch(r"(\d+) of (\d+) decisions would change; predicted TTFT p99 ([+-]\d+%)", told["review"])
        assert found is not None and 0 < int(found[1]) <= int(found[2]) >= 20
        assert told["review"] in [line.get("review") for line in lines]
        (folder / "mine.yaml").write_text(TURNS.format(name="mine", match="null").replace("about: x", "about: y"))
        told = (await city.client.post("/admin/policies/reload")).json()
        assert told["changed"] and told["review"].startswith("0 of "), "against the set before, not against the past"
        assert {answer.status_code for answer in answers} == {200}


async def test_a_new_file_takes_the_requests_that_it_matches_and_no_others(open_city: OpenCity, folder: Path) -> None:
    """By tenant; every answer names the policy that decided it."""
    async with open_city(policy="mine", policies=folder) as city:
        assert (await city.chat(chat(1))).headers["x-warmroute-policy"] == "mine"
        (folder / "theirs.yaml").write_text(TURNS.format(name="theirs", match="{tenant: acme}"))
        await city.until(lambda: len(city.program.policies.current().active) == 2)
        body = {"model": "demo", "messages": chat(1), "max_tokens": 4}
        for tenant, policy in (("acme", "theirs"), ("others", "mine"), ("", "mine")):
            answer = await city.client.post("/v1/chat/completions", json=body, headers={"x-tenant-id": tenant})
            assert answer.headers["x-warmroute-policy"] == policy


async def test_a_filter_gives_way_where_nobody_would_be_left_unless_it_is_strict(
    open_city: OpenCity, folder: Path
) -> None:
    """One pod of three is taken; then no pod is, by wish and by order. The refusal is a 503 that names the filter."""
    async with open_city(policy="mine", policies=folder, pods=3) as city:
        only = city.engines[1].url.removeprefix("http://")
        for said, status in ((f'{{only: "{only}"}}', 200), ("{only: nobody}", 200), ("{only: no, strict: true}", 503)):
            (folder / "mine.yaml").write_text(default() + f"filters: {{pods: {said}}}\n")
            assert (await city.client.post("/admin/policies/reload")).json()["changed"]
            answers = [await city.chat(chat(number)) for number in range(6)]
            assert {answer.status_code for answer in answers} == {status}
            if only in said:
                assert {answer.headers["x-warmroute-pod"] for answer in answers} == {only}
        assert "The filter `pods` of policy `mine` keeps no ready pod" in answers[-1].json()["error"]["message"]


async def test_a_broken_file_changes_nothing_but_a_metric_and_a_message_with_its_line(
    open_city: OpenCity, folder: Path
) -> None:
    """/readyz says file and line and stays ready; what is repaired is taken up."""
    async with open_city(policy="mine", policies=folder) as city, under_load(city) as answers:
        good = version(city)
        (folder / "mine.yaml").write_text(default().replace("eviction", "evicton"))
        await city.until(lambda: bool(city.program.policies.error))
        assert version(city) == good
        assert await metric(city, "warmroute_policy_reload_failed") == "1.0"
        ready = await city.client.get("/readyz")
        assert ready.status_code == 200
        assert "mine.yaml:5: costs.evicton: unknown key; did you mean 'eviction'?" in ready.json()["policies"]["error"]
        (folder / "mine.yaml").write_text(default(reuse=2.0))
        await city.until(lambda: version(city) != good)
        assert await metric(city, "warmroute_policy_reload_failed") == "0.0"
        assert "error" not in (await city.client.get("/readyz")).json()["policies"]
        assert {answer.status_code for answer in answers} == {200}


async def test_a_mounted_configmap_is_followed_through_its_links(open_city: OpenCity, tmp_path: Path) -> None:
    """Kubernetes swaps the link `..data`; the files' own links never change."""
    for number, reuse in enumerate((1.5, 4.0)):
        (tmp_path / f"..{number}").mkdir()
        (tmp_path / f"..{number}" / "mine.yaml").write_text(default(reuse))
    (tmp_path / "..data").symlink_to("..0")
    (tmp_path / "mine.yaml").symlink_to("..data/mine.yaml")
    async with open_city(policy="mine", policies=tmp_path) as city:
        before = version(city)
        (tmp_path / "..new").symlink_to("..1")
        (tmp_path / "..new").replace(tmp_path / "..data")
        await city.until(lambda: version(city) != before)


async def test_a_hangup_and_an_admin_call_read_the_files_at_once(open_city: OpenCity, folder: Path) -> None:
    """The call says what came of it, in the error with file and line."""
    async with open_city(policy="mine", policies=folder) as city:
        answer = await city.client.post("/admin/policies/reload")
        assert answer.json() == {"version": version(city), "changed": False, "review": None}
        (folder / "mine.yaml").write_text("name: [\n")
        answer = await city.client.post("/admin/policies/reload")
        assert answer.status_code == 400
        assert "mine.yaml:" in answer.json()["error"]["message"]
        (folder / "mine.yaml").write_text(default(reuse=9.0))
        os.kill(os.getpid(), signal.SIGHUP)
        await city.until(lambda: not city.program.policies.error)
        shown = (await city.client.get("/admin/policies")).json()
        assert shown["active"][0]["costs"]["eviction"] == "EvictionTerm(reuse=9.0)"
        assert shown["error"] is None


async def test_what_was_learnt_survives_a_reload(open_city: OpenCity, folder: Path) -> None:
    """The index, the shared prefixes and the calibration are not the policies' own."""
    async with open_city(policy="mine", policies=folder) as city:
        first = await city.chat(chat(1))
        (folder / "mine.yaml").write_text(default(reuse=3.0))
        assert (await city.client.post("/admin/policies/reload")).json()["changed"]
        again = await city.chat(chat(1))
        assert again.headers["x-warmroute-pod"] == first.headers["x-warmroute-pod"]
        assert int(again.headers["x-warmroute-cached-tokens"]) > 0


async def test_requests_are_counted_by_class_and_tenant(open_city: OpenCity) -> None:
    """A class that the client says, and one that is seen."""
    async with open_city() as city:
        body = {"model": "demo", "messages": chat(1), "max_tokens": 4}
        said = {"x-workload-class": "batch", "x-tenant-id": "etl"}
        await city.client.post("/v1/chat/completions", json=body, headers=said)
        await city.client.post("/v1/chat/completions", json=body | {"messages": chat(7), "stream": True})
        lines = (await city.client.get("/metrics")).text
        assert 'warmroute_class_requests_total{class="batch",result="ok",tenant="etl"} 1.0' in lines
        assert 'warmroute_class_requests_total{class="one_off",result="ok",tenant=""} 1.0' in lines
        assert 'warmroute_class_time_to_first_token_seconds_count{class="one_off",policy="cost_aware"} 1.0' in lines


@pytest.mark.parametrize(("attempts", "status"), [(1, 503), (2, 200)])
async def test_a_policy_says_how_often_it_is_tried(
    open_city: OpenCity, folder: Path, attempts: int, status: int
) -> None:
    """One attempt is the first pod's answer, whatever it is."""
    (folder / "mine.yaml").write_text(default() + f"retry: {{attempts: {attempts}}}\n")
    async with open_city(policy="mine", policies=folder) as city:
        pod = (await city.chat(chat(1))).headers["x-warmroute-pod"]
        engine = next(one for one in city.engines if one.url.endswith(pod))
        engine.inject(Fault(kind=FaultKind.STATUS, status=HTTPStatus.SERVICE_UNAVAILABLE))
        assert (await city.chat(chat(1))).status_code == status


async def test_targets_are_counted_as_met_or_not(open_city: OpenCity, folder: Path) -> None:
    """Streamed answers under a policy that promises something."""
    (folder / "mine.yaml").write_text(default() + "slo: {ttft_ms: 60000}\n")
    async with open_city(policy="mine", policies=folder) as city:
        await city.chat(chat(1), stream=True)
        await city.chat(chat(1))
        assert await metric(city, 'warmroute_policy_slo_requests_total{met="true",policy="mine"}') == "1.0"
