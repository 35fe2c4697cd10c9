"""A key that is removed from the file of tenants stops, as a file and as a mounted Secret."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from hashlib import sha256
from itertools import count
from pathlib import Path
from statistics import median

import httpx
import pytest

from loadtest.commands.child_processes import RouterUrls
from loadtest.mock_engine.mock_config import MockEngineConfig
from tests.stories.test_routers_on_one_port import running_router

pytestmark = [pytest.mark.net, pytest.mark.anyio]
KEYS = ("first", "second", "third")
WITHIN_S = 1.0
"""What the README says. The median of the removals counts: a busy machine may delay one."""


def replaced(file: Path, text: str) -> None:
    """As an editor or `mv` does it."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


_versions = count()


def remounted(file: Path, text: str) -> None:
    """As a kubelet updates a Secret: the link `..data` is replaced, the links to its files stay."""
    folder = file.parent
    version, old = folder / f"..{next(_versions)}", folder / "..data"
    version.mkdir()
    (version / file.name).write_text(text)
    link, before = folder / "..data_tmp", old.resolve()
    link.symlink_to(version.name)
    link.replace(old)
    if file.is_symlink():
        shutil.rmtree(before)
    else:
        file.symlink_to(f"..data/{file.name}")


async def until_refused(router: RouterUrls, client: httpx.AsyncClient, key: str) -> None:
    """Wait until this router refuses the key."""
    while (
        await client.get(router.public + "/v1/models", headers={"authorization": f"Bearer {key}"})
    ).status_code != 401:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("write", [replaced, remounted])
async def test_a_removed_key_stops_within_a_second(
    engine_config: Callable[..., MockEngineConfig], tmp_path: Path, write: Callable[[Path, str], None]
) -> None:
    """The keys that are left work."""
    loop, mount = asyncio.get_running_loop(), tmp_path / "mount"
    mount.mkdir()

    def keep(*keys: str) -> None:
        digests = ", ".join(sha256(key.encode()).hexdigest() for key in keys)
        write(mount / "tenants.yaml", f"tenants: [{{name: acme, keys: [{digests}]}}]")

    keep(*KEYS, "kept")
    taken_s = []
    async with (
        running_router(engine_config, tmp_path, tenants=str(mount / "tenants.yaml")) as router,
        httpx.AsyncClient(trust_env=False) as client,
    ):
        for number, key in enumerate(KEYS, 1):
            began_s = loop.time()
            keep(*KEYS[number:], "kept")
            await until_refused(router, client, key)
            taken_s.append(loop.time() - began_s)
        kept = await client.get(f"{router.public}/v1/models", headers={"authorization": "Bearer kept"})
        assert kept.status_code == 200
    assert median(taken_s) < WITHIN_S, taken_s
