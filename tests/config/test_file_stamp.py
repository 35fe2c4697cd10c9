"""Changes of files that are noticed without reading them."""

from __future__ import annotations

import os
from pathlib import Path

from router.config.reloaded import stamp_of, stamps_of


def test_every_change_of_a_file_or_of_a_links_target_changes_the_stamp(tmp_path: Path) -> None:
    """Also one of equal size that keeps the time of the last change, as `cp -p` does."""
    file, other, link = tmp_path / "a", tmp_path / "b", tmp_path / "link"
    file.write_text("one")
    other.write_text("two")
    link.symlink_to(file)
    seen = [stamp_of(link), stamp_of(link)]
    link.unlink()
    link.symlink_to(other)
    os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    seen.append(stamp_of(link))
    other.write_text("more")
    seen.append(stamp_of(link))
    assert seen[0] == seen[1] and len(set(seen)) == 3


def test_a_file_that_is_missing_or_not_named_has_none(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert stamps_of(str(tmp_path / "a"), tmp_path / "b", None, "") == (stamp_of(tmp_path / "a"), None, None, None)
