"""Names over real sockets: what clients, operators and bills see of them."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from tests.stories.conftest import Deploy

pytestmark = [pytest.mark.net, pytest.mark.anyio]
NAMES = "names:\n- {name: gpt-4o, to: demo}\n- {name: claude-*, to: demo}\n"


@pytest.fixture
def names(tmp_path: Path) -> Path:
    file = tmp_path / "names.yaml"
    file.write_text(NAMES)
    return file


def chat(model: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


async def test_a_name_is_served_and_shown_with_its_model(deploy: Deploy, names: Path, tmp_path: Path) -> None:
    """To its client in a header; in metrics, bills, receipts and explanations as the file has it."""
    tenants, usage, receipts = (tmp_path / name for name in ("tenants.yaml", "usage.jsonl", "receipts.jsonl"))
    tenants.write_text(f"tenants: [{{name: acme, keys: [{sha256(b'key').hexdigest()}]}}]")
    async with deploy(1, names=names, tenants=tenants, usage=usage, receipts=receipts) as found:
        headers = {"authorization": "Bearer key"}
        listed = (await found.client.get("/v1/models", headers=headers)).json()["data"]
        assert [card["id"] for card in listed] == ["demo", "gpt-4o"]
        assert (await found.client.get("/v1/models/gpt-4o", headers=headers)).json()["id"] == "gpt-4o"
        for name in ("gpt-4o", "claude-sonnet", "claude-haiku"):
            answer = await found.client.post("/v1/chat/completions", json=chat(name), headers=headers)
            assert (answer.status_code, answer.headers["x-warmroute-model"]) == (200, "demo")
            assert answer.json()["model"] == "demo"
        plain = await found.client.post("/v1/chat/completions", json=chat("demo"), headers=headers)
        assert "x-warmroute-model" not in plain.headers
        metrics = (await found.admin.get("/metrics")).text
        explained = (await found.admin.get(f"/admin/explain/{answer.headers['x-request-id']}")).json()
        assert (explained["receipt"]["name"], explained["receipt"]["model"]) == ("claude-*", "demo")
    assert 'warmroute_named_requests_total{model="demo",name="claude-*",result="ok"} 2' in metrics
    assert "claude-haiku" not in metrics
    for file in (usage, receipts):
        lines = [msgspec.json.decode(line) for line in file.read_text().splitlines()]
        names_of = [line.get("name", "") for line in lines if line.get("model") == "demo"]
        assert names_of == ["gpt-4o", "claude-*", "claude-*", ""]


async def test_a_change_of_the_file_is_reviewed_and_a_mistake_changes_nothing(deploy: Deploy, names: Path) -> None:
    write = names.write_text
    async with deploy(1, names=names) as found:
        assert (await found.client.post("/v1/chat/completions", json=chat("gpt-4o"))).status_code == 200
        with capture_logs() as log:
            write(f"{NAMES}- {{name: gpt-5, to: gpt-4o}}\n")
            await found.until(lambda: any(line["log_level"] == "error" for line in log))
        ready = (await found.admin.get("/readyz")).json()
        assert "names.2.to: 'gpt-4o' is a name of this file" in ready["names"]["error"]
        assert (await found.client.post("/v1/chat/completions", json=chat("gpt-4o"))).status_code == 200
        write("names: [{name: gpt-4o, to: next}]")

        async def is_read() -> bool:
            return (await found.client.post("/v1/chat/completions", json=chat("gpt-4o"))).status_code == 503

        await found.until(is_read)
        changes = (await found.admin.get("/admin/changes")).json()
    review = next(one["cause"] for one in changes if one["what"] == "names")
    assert "requests would become another model; demo -> next: " in review
