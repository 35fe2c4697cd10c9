"""The image: its own steps, executed here, give a small tree that an unprivileged user runs without writing to it."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from collections.abc import Iterator
from http import HTTPStatus
from importlib import metadata
from pathlib import Path

import httpx
import pytest
from packaging.utils import canonicalize_name

from tests.packaging.dockerfile import ScratchRoot, Stage, stages
from tests.redis_servers.server import free_port

pytestmark = pytest.mark.net
ROOT = Path(__file__).parents[2]
DEADLINE_S = 60
BASE_IMAGE_MB = 125
"""python:3.12-slim, unpacked."""
MAX_IMAGE_MB = 335


@pytest.fixture(scope="module")
def final() -> Stage:
    return stages((ROOT / "Dockerfile").read_text(encoding="utf-8"))[-1]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> ScratchRoot:
    """The root after all steps: the final stage only copies from the build stage."""
    folder = tmp_path_factory.mktemp("image")
    folder.chmod(0o755)
    root = ScratchRoot(folder, ROOT)
    root.build(stages((ROOT / "Dockerfile").read_text(encoding="utf-8"))[0])
    return root


def test_the_final_stage_only_copies_the_environment(final: Stage) -> None:
    assert [text for name, text in final.steps if name in ("RUN", "COPY", "ADD")] == [
        "--from=build /opt/warmroute /opt/warmroute"
    ]


def test_containers_are_not_root_and_stop_by_sigterm(final: Stage) -> None:
    uid, gid = map(int, final.last("USER").split(":"))
    assert min(uid, gid) >= 10_000
    assert final.last("STOPSIGNAL") == "SIGTERM"
    assert final.command[:2] == ["warmroute", "serve"]


def test_labels_name_the_image(final: Stage) -> None:
    labels = final.pairs("LABEL")
    assert {
        f"org.opencontainers.image.{name}" for name in ("title", "licenses", "version", "revision")
    } <= labels.keys()


def test_every_package_has_a_hash_and_the_version_of_the_lock() -> None:
    lock = (ROOT / "image.lock").read_text(encoding="utf-8")
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    packages = re.split(r"\n(?=\S)", lock.strip())
    assert len(packages) > 40
    for package in packages:
        name, _, version = re.split(r"[ \\\n]", package)[0].partition("==")
        assert "--hash=sha256:" in package, name
        assert pins.get(name, version) == version, f"{name}: run make lock"


def test_the_image_is_small(image: ScratchRoot) -> None:
    files = [path.lstat() for path in (image.folder / "opt/warmroute").rglob("*")]
    added_mb = sum(one.st_blocks * 512 for one in files) / 1e6
    assert BASE_IMAGE_MB + added_mb < MAX_IMAGE_MB
    assert not list(image.folder.glob("opt/warmroute/lib/python*/site-packages/hatchling"))


def test_a_bill_of_materials_can_be_made_from_the_installed_packages(image: ScratchRoot) -> None:
    """Scanners, such as that of `docker buildx build --sbom=true`, read the metadata of the installed packages."""
    lock = (ROOT / "image.lock").read_text(encoding="utf-8")
    locked = {
        canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", lock, re.MULTILINE)
    }
    [site] = image.folder.glob("opt/warmroute/lib/python*/site-packages")
    found = {canonicalize_name(one.name): one.version for one in metadata.distributions(path=[str(site)])}
    assert found.pop(canonicalize_name("warmroute"))
    assert found and found.items() <= locked.items()


@pytest.fixture
def environment(final: Stage) -> dict[str, str]:
    declared = final.pairs("ENV")
    return {**declared, "PATH": declared["PATH"].replace("$PATH", "/usr/bin:/bin")}


def wait_until_ok(url: str) -> None:
    """Returns once a server that is about to start answers 200."""
    end, found = time.monotonic() + DEADLINE_S, "no answer"
    while time.monotonic() < end:
        with contextlib.suppress(httpx.TransportError):
            found = str(status := httpx.get(url, timeout=DEADLINE_S).status_code)
            if status == HTTPStatus.OK:
                return
        time.sleep(0.05)
    raise AssertionError(f"{url}: {found}")


@pytest.fixture
def engine(image: ScratchRoot, final: Stage, environment: dict[str, str]) -> Iterator[str]:
    """URL of a mock engine, of the same image."""
    command = ["warmroute", "mock-engine", "--port", str(free_port()), "--model", "demo", "--time-scale", "0"]
    with image.running(command, environment, final.last("USER")) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]


def test_an_unprivileged_user_serves_from_a_read_only_root(
    image: ScratchRoot, final: Stage, environment: dict[str, str], engine: str
) -> None:
    port, admin = free_port(), free_port()
    limits = {"drain_delay_s": 0, "drain_timeout_s": 1}
    config = {"listen": {"port": port}, "admin": {"port": admin}, "pods": [{"url": engine}], "limits": limits}
    place = image.folder / "etc/warmroute"
    place.mkdir(exist_ok=True)
    (place / "router.yaml").write_text(json.dumps({**config, "unlisted_models": "engine"}))
    before = {path: path.lstat().st_mtime_ns for path in (image.folder / "opt").rglob("*")}
    with image.running(final.command, environment, final.last("USER")) as router:
        for probe in ("livez", "readyz"):
            wait_until_ok(f"http://127.0.0.1:{port}/{probe}")
        body = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        chat = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=DEADLINE_S)
        assert chat.status_code == 200, chat.text
        router.send_signal(signal.SIGTERM)
        assert router.wait(DEADLINE_S) in (0, -signal.SIGTERM)  # not as process 1, it ends by the signal itself
    assert {path: path.lstat().st_mtime_ns for path in (image.folder / "opt").rglob("*")} == before
