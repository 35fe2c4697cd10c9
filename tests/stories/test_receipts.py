"""The simulator replays a router's receipts."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.commands.simulate_setup import DEFAULT_FLEET, Source, experiment
from loadtest.simulator.compare import Setting
from router.cli.receipt_files import receipts_of
from tests.stories.conftest import Chat, Deploy

pytestmark = [pytest.mark.net, pytest.mark.anyio]

SECRET = "the harbour's secret is seven anchors "


def shared_chat(number: int) -> Chat:
    return [{"role": "system", "content": SECRET * 60}, {"role": "user", "content": f"boat {number} " * 30}]


async def test_receipts_are_replayed_in_the_simulator(deploy: Deploy, tmp_path: Path) -> None:
    """Every request with lengths, blocks and hits, without prompt text; the simulator finds the same hits as the
    engines."""
    file = tmp_path / "receipts.jsonl"
    async with deploy(pods=2, receipts=file) as deployment:
        for number in range(12):
            assert (await deployment.chat(shared_chat(number))).status_code == 200
        assert (
            await deployment.client.post("/v1/chat/completions", json={"model": "none", "messages": []})
        ).status_code >= 400
    receipts = receipts_of(file)
    good = [one for one in receipts if one.result == "ok"]
    assert len(good) == 12 and len(receipts) >= 12
    assert "anchors" not in file.read_text() and file.stat().st_mode & 0o077 == 0
    first, *others = good
    assert first.prompt_tokens > 500 and first.output_tokens == 8 and first.cached_tokens == 0
    assert all(one.blocks[:3] == first.blocks[:3] for one in others)
    assert {one.pod for one in good} <= {engine.url.removeprefix("http://") for engine in deployment.engines}
    setup = experiment(DEFAULT_FLEET, Source(file))
    again = setup.run(Setting("cost_aware", 1.0, 2)).figures
    found = sum(one.cached_tokens or 0 for one in good)
    assert again.requests == 12
    assert abs(again.cached_tokens - found) <= 128 * 12
