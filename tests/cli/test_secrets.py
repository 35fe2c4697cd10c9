"""No command prints a secret of its configuration or options."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.command_line import Typed

CANARY = "canary7sesame"
URL = f"redis://me:{CANARY}@127.0.0.1:1/0"
VALID = f"index: {{redis: {{url: '{URL}'}}}}\n"
BROKEN = f"index: {{redis: {{url: 'redis://me:{CANARY}@h:port'}}}}\n"


@pytest.mark.parametrize(
    ("text", "arguments", "where"),
    [
        (BROKEN, ["config", "check", "FILE"], "router.yaml:1: index.redis.url: "),
        (BROKEN, ["serve", "--config", "FILE"], "router.yaml:1: index.redis.url: "),
        (BROKEN, ["publish", "--config", "FILE"], "router.yaml:1: index.redis.url: "),
        (VALID, ["serve", "--config", "FILE", "--pod", f"http://me:{CANARY}@h"], "command line: pods.0.url: "),
        (VALID, ["serve", "--config", "FILE", "--port", "99999"], "command line: listen.port: "),
        (VALID, ["publish", "--config", "FILE", "--redis", f"{CANARY}@h"], "command line: index.redis.url: "),
        (VALID, ["publish", "--config", "FILE", "--pod", f"http://:{CANARY}@h"], "command line: pods.0.url: "),
        (VALID, ["publish", "--config", "FILE", "--pod", "http://h", "--engine", "?"], "command line: pods.0.engine: "),
    ],
)
def test_a_wrong_setting_or_option_is_reported_in_one_line(
    typed: Typed, tmp_path: Path, text: str, arguments: list[str], where: str
) -> None:
    """Without a traceback and without the secret."""
    file = tmp_path / "router.yaml"
    file.write_text(text)
    ended = typed(*(str(file) if each == "FILE" else each for each in arguments))
    assert ended.code == 2
    assert where in ended.err
    assert len(ended.err.splitlines()) == 1
    assert CANARY not in ended.out + ended.err


@pytest.mark.net
def test_an_unreachable_redis_is_reported_without_its_password(typed: Typed, tmp_path: Path) -> None:
    """Also by the message of the Redis library."""
    file = tmp_path / "router.yaml"
    file.write_text(VALID)
    ended = typed("doctor", "--config", file, "--url", "http://127.0.0.1:1")
    assert ended.code != 0
    assert CANARY not in ended.out + ended.err
