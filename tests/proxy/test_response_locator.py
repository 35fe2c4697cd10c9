"""Where a request for a stored response goes, and why one is lost."""

from __future__ import annotations

import asyncio
from time import monotonic

import pytest

from router.errors import UnknownResponse
from router.fleet.fleet import PodEvent
from router.frontends.response_locator import ResponseLocator
from router.index.stored_responses import StoredResponse, StoredResponses
from router.request.decisions import only
from router.types import PodState
from tests.kit.deadlines import DEADLINE_S
from tests.kit.scenes import fleet_of, pod

pytestmark = pytest.mark.anyio


class Town:
    """Two pods, and a response that `a` stored."""

    def __init__(self, *names: str) -> None:
        self.fleet = fleet_of(*map(pod, names or ("a", "b")))
        self.shared: dict[str, StoredResponse] = {}
        self.locator = ResponseLocator(self.fleet, StoredResponses(), self.find)
        self.locator.stored.learn(StoredResponse("r", "a", "m", monotonic()), monotonic())

    async def find(self, response_id: str) -> StoredResponse | None:
        return self.shared.get(response_id)

    async def locate(self, response_id: str) -> StoredResponse:
        async with asyncio.timeout(DEADLINE_S):
            return await self.locator.locate(response_id, "p")

    async def refusal(self, response_id: str) -> str:
        with pytest.raises(UnknownResponse) as caught:
            await self.locate(response_id)
        assert caught.value.param == "p"
        return str(caught.value)


@pytest.mark.parametrize(("owner", "is_found"), [("acme", True), (None, True), ("other", False), ("", False)])
@pytest.mark.parametrize("pods", [("a",), ("a", "b")])
async def test_only_its_own_tenant_and_operators_find_a_response(
    owner: str | None, pods: tuple[str, ...], *, is_found: bool
) -> None:
    """To others it is as unknown as one that never was, also if there is only one pod."""
    town = Town(*pods)
    town.locator.stored.learn(StoredResponse("r2", "a", "m", monotonic(), "acme"), monotonic())
    if is_found:
        assert (await town.locator.locate("r2", "p", owner)).owner == "acme"
    elif owner or len(pods) > 1:
        texts = []
        for response_id in ("r2", "r3"):
            with pytest.raises(UnknownResponse) as caught:
                await town.locator.locate(response_id, "p", owner)
            texts.append(str(caught.value).replace(response_id, "r"))
        assert texts[0] == texts[1]


async def test_a_known_response_is_found() -> None:
    assert (await Town().locate("r")).pod == "a"


async def test_a_response_of_another_router_is_found_and_kept() -> None:
    """Also when it arrives a moment later than its follow-up."""
    town = Town()
    asked = asyncio.ensure_future(town.locate("r2"))
    await asyncio.sleep(0)
    town.shared["r2"] = StoredResponse("r2", "b", "m", monotonic())
    assert (await asked).pod == "b"
    town.shared.clear()
    assert (await town.locate("r2")).pod == "b"


async def test_an_unknown_response_is_refused_unless_there_is_one_pod() -> None:
    """That pod answers for itself, also after a restart of the router."""
    assert "not known here" in await Town().refusal("r3")
    found = await Town("a").locate("r3")
    assert (found.pod, found.model) == ("a", "m")


@pytest.mark.parametrize("event", ["restarted", "gone"])
async def test_the_responses_of_a_lost_pod_are_lost(event: str) -> None:
    """The message says why, and names no pod."""
    town = Town()
    if event == "gone":
        town.fleet.sync([pod("b"), pod("c")])
    else:
        town.fleet.restarted("a")
    message = await town.refusal("r")
    assert "restarted or left" in message and "`a`" not in message


async def test_an_id_of_any_length_is_shown_short() -> None:
    """It comes from the client; no other router is asked."""
    town = Town()
    town.shared["x" * 1000] = StoredResponse("x", "a", "m", 0.0)
    assert len(await town.refusal("x" * 1000)) < 400


def test_a_draining_pod_still_serves_what_it_stores() -> None:
    """No other pod could. An ejected one does not."""
    fleet = fleet_of(pod("a"), pod("b"))
    fleet.event("a", PodEvent.DRAIN)
    fleet.event("b", PodEvent.EJECT)
    states = [[(each.pod.id, each.state) for each in only(fleet.snapshot, name).pods] for name in "abc"]
    assert states == [[("a", PodState.READY)], [("b", PodState.EJECTED)], []]
    assert only(fleet.snapshot, "a") is only(fleet.snapshot, "a")
