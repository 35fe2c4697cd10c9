"""`warmroute tenants key`."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from router.config.tenant_file import TenantFile
from tests.kit.command_line import Typed


def test_a_new_key_is_accepted_from_the_printed_lines(typed: Typed, tmp_path: Path) -> None:
    """Under `keys` and in a file of keys. Each call makes another key, which is printed once."""
    first, second = typed("tenants", "key", "acme"), typed("tenants", "key", "acme", "--days", 30)
    keys = []
    for ended in (first, second):
        assert ended.code == 0
        (key,) = re.findall(r"sk-wr-\S{40,}", ended.out)
        keys.append(key)
    inline = re.search(r"^  (- .*)$", first.out, re.MULTILINE)
    line = re.search(r"^  (acme .* until .*)$", second.out, re.MULTILINE)
    assert inline is not None and line is not None
    (tmp_path / "keys.txt").write_text(f"{line[1]}\n")
    (tmp_path / "tenants.yaml").write_text(f"tenants:\n- name: acme\n  keys:\n  {inline[1]}\nkey_files: [keys.txt]\n")
    tenants = TenantFile(tmp_path / "tenants.yaml").read()
    assert keys[0] != keys[1] and tenants.by_name.keys() == {"acme"}
    assert tenants.find(keys[0].encode(), 9e9) is tenants.find(keys[1].encode(), 0) is tenants.by_name["acme"]
    assert tenants.find(keys[1].encode(), 9e9) is None


@pytest.mark.parametrize(("key", "is_accepted"), [("k" * 40, True), ("short", False), ("k" * 30 + "é", False)])
def test_an_existing_key_is_read_and_not_printed(
    typed: Typed, monkeypatch: pytest.MonkeyPatch, key: str, *, is_accepted: bool
) -> None:
    """A short one could be found by trying."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{key}\n"))
    ended = typed("tenants", "key", "acme", "--existing")
    assert (ended.code == 0) is is_accepted
    assert key not in ended.out + ended.err
    assert bool(re.search(r"acme [0-9a-f]{64}$", ended.out, re.MULTILINE)) is is_accepted
