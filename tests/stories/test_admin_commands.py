"""An operator changes and inspects a running router at the command line."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from structlog.testing import capture_logs

from router.cli import main
from tests.kit.command_line import Ended
from tests.stories.conftest import Deploy, Deployment

pytestmark = [pytest.mark.net, pytest.mark.anyio]

TypedAt: TypeAlias = Callable[..., Awaitable[Ended]]


@pytest.fixture
def typed_at(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> TypedAt:
    """Run `warmroute` in a thread against the admin listener of a deployment, on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    async def run(deployment: Deployment, *arguments: object) -> Ended:
        url = str(deployment.admin.base_url)
        monkeypatch.setattr(sys, "argv", ["warmroute", *map(str, arguments), "--url", url])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended, capture_logs():  # those of the router, which is in this process
            await asyncio.to_thread(main)
        captured = capsys.readouterr()
        return Ended(int(ended.value.code or 0), captured.out, captured.err)

    return run


async def test_pods_are_drained_and_undrained_by_id_or_url(deploy: Deploy, typed_at: TypedAt) -> None:
    """The list shows the state; ids are not cut at 80 columns."""
    async with deploy(pods=2) as deployment:
        first, second = deployment.program.fleet.snapshot.pods
        listed = await typed_at(deployment, "pods")
        assert listed.code == 0 and max(map(len, listed.out.splitlines())) <= 80
        assert listed.out.count("ready") == 2 and first.pod.id in listed.out and second.pod.id in listed.out
        rows = json.loads((await typed_at(deployment, "pods", "--json")).out)
        assert [(row["id"], row["state"]) for row in rows] == [(first.pod.id, "ready"), (second.pod.id, "ready")]
        drained = await typed_at(deployment, "pods", "drain", first.pod.id)
        assert (drained.code, drained.out) == (0, f"{first.pod.id}: draining\n")
        assert f"pod={first.pod.id}" not in drained.err and "known to this router alone, until it ends" in drained.err
        one = await typed_at(deployment, "pods", "list", first.pod.url)
        assert "draining" in one.out and second.pod.id not in one.out
        undrained = await typed_at(deployment, "pods", "undrain", first.pod.url)
        assert undrained.code == 0 and "draining" not in undrained.out


async def test_the_list_names_other_front_ends(deploy: Deploy, typed_at: TypedAt) -> None:
    """vLLM's in Rust; the one in Python is the usual one."""
    async with deploy(engines=[{}, {"front_end": "rust"}]) as deployment:
        rows = json.loads((await typed_at(deployment, "pods", "--json")).out)
        shown = {row["id"]: row["front_end"] for row in rows}
        assert sorted(shown.values()) == ["", "rust"]
        rust = next(pod for pod, front_end in shown.items() if front_end)
        assert [line for line in (await typed_at(deployment, "pods")).out.splitlines() if "front end" in line] == [
            f"{rust}: front end: rust"
        ]
        deployment.program.fleet.learn(rust, misreads=frozenset({"developer", "tools"}))
        text = (await typed_at(deployment, "pods")).out
        assert f"{rust}: makes other prompts of chats with: developer, tools\n" in text


async def test_pods_are_drained_by_label_with_a_reason(
    deploy: Deploy, typed_at: TypedAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list shows who drained them, when and why."""
    monkeypatch.setenv("USER", "ada")
    reach = lambda engine: {"url": engine.url, "rack": "r12"}  # noqa: E731
    async with deploy(pods=2, reach=reach) as deployment:
        ids = [one["id"] for one in await deployment.pods()]
        drained = await typed_at(deployment, "pods", "drain", "rack=r12", "--why", "new power supply")
        assert drained.out == "".join(f"{one}: draining\n" for one in ids)
        shown = " ".join((await typed_at(deployment, "pods")).out.split())
        assert shown.count("draining: drained by ada, 20") == 2 and shown.count("UTC, rack=r12: new power supply") == 2
        nowhere = await typed_at(deployment, "pods", "drain", "rack=r13")
        assert nowhere.out == "" and "no pod has these labels now" in nowhere.err
        assert "drain rack=r13: drained by ada, 20" in " ".join((await typed_at(deployment, "pods")).out.split())
        assert (await typed_at(deployment, "pods", "undrain", "rack=r14")).code == 1
        lifted = await typed_at(deployment, "pods", "undrain", "rack=r12")
        assert lifted.code == 0 and "rack=r12: drain lifted; known to" in lifted.err
        await deployment.until(lambda: deployment.ready() == 2)


async def test_pods_are_removed_and_added(deploy: Deploy, typed_at: TypedAt, tmp_path: Path) -> None:
    """By URL, or with all keys of an entry in a file."""
    async with deploy(pods=2) as deployment:
        pod = deployment.program.fleet.snapshot.pods[0].pod
        removed = await typed_at(deployment, "pods", "remove", pod.id)
        assert (removed.code, removed.out) == (0, f"{pod.id}: gone\n")
        assert pod.id not in (await typed_at(deployment, "pods")).out
        added = await typed_at(deployment, "pods", "add", pod.url)
        assert (added.code, added.out) == (0, f"{pod.url}: joining\n")
        assert pod.id in (await typed_at(deployment, "pods")).out
        entry = tmp_path / "pod.yaml"
        entry.write_text("url: http://127.0.0.1:1\nid: third\nzone: b\n")
        assert (await typed_at(deployment, "pods", "add", entry)).code == 0
        assert "third" in (await typed_at(deployment, "pods")).out


MISTAKES: dict[tuple[str, ...], tuple[int, str]] = {
    ("drain", "nobody"): (1, "unknown pod 'nobody'; known: 127.0.0.1:"),
    ("add", "10.0.0.7:8000"): (1, "must look like http://host:port; `http://` is missing"),
    ("add", "missing.yaml"): (2, "missing.yaml: cannot be read"),
    ("drain",): (2, "needs a pod"),
    ("restart", "x"): (2, "undrain"),
}


async def test_a_mistake_is_explained(deploy: Deploy, typed_at: TypedAt) -> None:
    """Without a traceback."""
    async with deploy(pods=1, wait=False) as deployment:
        for arguments, (code, what) in MISTAKES.items():
            ended = await typed_at(deployment, "pods", *arguments)
            assert (ended.code, ended.out) == (code, "") and what in " ".join(ended.err.split())


async def test_preview_prints_a_decision_and_sends_nothing(
    deploy: Deploy, typed_at: TypedAt, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The request is a prompt, a file or standard input."""
    body = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "Hello"}]})
    file = tmp_path / "request.json"
    file.write_text(body)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(body.encode())))
    async with deploy(pods=2, probes={"self_test": False}) as deployment:  # no prompts of our own
        for arguments in (("--model", "demo", "--prompt", "Hello"), (str(file),), ("-",)):
            ended = await typed_at(deployment, "preview", *arguments)
            assert ended.code == 0, ended.err
            assert "= cost, ms" in ended.out and "not sent" in ended.out
            assert max(map(len, ended.out.splitlines())) <= 80
        unknown = await typed_at(deployment, "preview", "--model", "other", "--prompt", "Hello")
        assert unknown.code == 1 and "other" in unknown.err
        assert (await typed_at(deployment, "preview")).code == 2
        for engine in deployment.engines:
            metrics = (await deployment.client.get(f"{engine.url}/metrics")).text
            prompt_tokens = [line for line in metrics.splitlines() if line.startswith("vllm:prompt_tokens_total")]
            assert prompt_tokens and all(line.endswith(" 0.0") for line in prompt_tokens)


@pytest.mark.parametrize("url", ["unix:", "http://127.0.0.1:1", "http://[", "ftp://x", "x" * 9])
async def test_no_router_is_one_line(
    url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1."""
    monkeypatch.setattr(sys, "argv", ["warmroute", "pods", "--url", url])
    with pytest.raises(SystemExit) as ended:
        main()
    error = capsys.readouterr().err
    assert ended.value.code == 1 and error.startswith(f"{url}: ") and error.count("\n") == 1


def test_a_missing_socket_is_one_line() -> None:
    """In a process of its own: httpx closes the socket of a failed connection only at its end."""
    command = [sys.executable, "-m", "router.cli", "pods", "--url", "unix:/nowhere.sock"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and ended.stderr.count("\n") == 1
    assert ended.stderr.startswith("unix:/nowhere.sock: [Errno 2] No such file or directory. Does the router run?")


def test_a_missing_token_file_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is no mistake of the URL."""
    monkeypatch.setattr(sys, "argv", ["warmroute", "pods", "--bearer-file", "/no/token"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == "--bearer-file /no/token: cannot be read: No such file or directory\n"
