"""Only the machine code of one architecture is left in a library."""

from __future__ import annotations

import struct

from loadtest.gpu.cubins import entries, slim

NAMES = b"\0.nv_fatbin\0.text\0"
HEADER_BYTES, ENTRY_HEADER_BYTES = 16, 64
PTX, MACHINE_CODE = 1, 2


def entry(kind: int, architecture: int, code: bytes) -> bytes:
    head = struct.pack("<HHIQIIHHI", kind, 0x101, ENTRY_HEADER_BYTES, len(code), 0, 0, 0, 0, architecture)
    return head.ljust(ENTRY_HEADER_BYTES, b"\0") + code


def library(*fat_binaries: bytes) -> bytes:
    """An ELF file with one section for all of them, with 8 bytes between two, and one for names."""
    content = b"".join(
        struct.pack("<IHHQ", 0xBA55ED50, 1, HEADER_BYTES, len(one)) + one + bytes(8) for one in fat_binaries
    )
    code_at = 64
    names_at = code_at + len(content)
    sections_at = names_at + len(NAMES)
    head = bytearray(64)
    struct.pack_into("<Q", head, 0x28, sections_at)
    struct.pack_into("<HHH", head, 0x3A, 64, 2, 1)
    found = struct.pack("<IIQQQQ", NAMES.index(b".nv"), 1, 0, 0, code_at, len(content)).ljust(64, b"\0")
    names = struct.pack("<IIQQQQ", NAMES.index(b".text"), 3, 0, 0, names_at, len(NAMES)).ljust(64, b"\0")
    return bytes(head) + content + NAMES + found + names


def test_other_architectures_ptx_and_unwanted_kernels_become_zeros() -> None:
    """The size and everything else stay as they were."""
    first = entry(PTX, 90, b"ptx.....") + entry(MACHINE_CODE, 80, b"ampere..") + entry(MACHINE_CODE, 90, b"hopper..")
    second = entry(MACHINE_CODE, 90, b"not wanted......")
    whole = library(first, second)
    result = slim(whole, 90, lambda code: b"not wanted" not in code)
    kept = [result[one.first : one.end].strip(b"\0") for one in entries(result)]
    assert kept == [b"", b"", b"hopper..", b""]
    assert [(one.first, one.end) for one in entries(result)] == [(one.first, one.end) for one in entries(whole)]
    assert len(result) == len(whole)
