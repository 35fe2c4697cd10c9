"""Removes GPU code that one GPU cannot use from the shared libraries of a wheel.

A library carries its kernels for many architectures in "fat binaries". On one machine the driver reads only the entries
of its own architecture, so the bytes of all others may be zeros: the library keeps its size and layout, and compresses
to a fraction. Half of vLLM's wheel is code for GPUs that the machine does not have.

Sources: the layout is that of `fatbinary_section.h` in NVIDIA's CUDA toolkit (the header of a fat binary) and of the
entries that `cuobjdump --list-elf` prints for vLLM 0.26.0.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

SECTION = ".nv_fatbin"
_MAGIC = 0xBA55ED50
_MACHINE_CODE = 2

KeepKernel = Callable[[bytes], bool]
"""Whether the machine code of an entry, as an uncompressed ELF file, is needed."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One kernel file in a fat binary: machine code for an architecture, or PTX."""

    kind: int
    architecture: int
    """Ten times the compute capability: 90 for Hopper."""
    first: int
    """Offset of its code in the library."""
    end: int


def slim(library: bytes, architecture: int, keep: KeepKernel = lambda _: True) -> bytes:
    """The library with zeros in place of PTX, of machine code for other GPUs, and of what `keep` refuses.

    A kernel that comes only as PTX is lost: in vLLM 0.26 those of Marlin and CUTLASS 2, for quantized weights."""
    result = bytearray(library)
    for entry in entries(library):
        exact = entry.kind == _MACHINE_CODE and entry.architecture == architecture
        if not (exact and keep(library[entry.first : entry.end])):
            result[entry.first : entry.end] = bytes(entry.end - entry.first)
    return bytes(result)


def entries(library: bytes) -> Iterator[Entry]:
    """The entries of all fat binaries of an ELF library."""
    for first, size in _sections(library, SECTION):
        at, end = first, first + size
        while at < end:
            magic, _, header_bytes, content_bytes = struct.unpack_from("<IHHQ", library, at)
            if magic != _MAGIC:  # padding between two fat binaries
                at += 8
                continue
            content = at + header_bytes
            yield from _entries(library, content, content + content_bytes)
            at = content + content_bytes


def _entries(library: bytes, at: int, end: int) -> Iterator[Entry]:
    while at < end:
        kind, _, header_bytes, code_bytes = struct.unpack_from("<HHIQ", library, at)
        (architecture,) = struct.unpack_from("<I", library, at + 28)
        code = at + header_bytes
        yield Entry(kind, architecture, code, code + code_bytes)
        at = code + code_bytes


def _sections(library: bytes, name: str) -> Iterator[tuple[int, int]]:
    """Offset and size of the sections with this name."""
    (headers,) = struct.unpack_from("<Q", library, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", library, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", library, headers + number * size) for number in range(count)]
    names = sections[names_at][4]
    for name_at, _, _, _, offset, length in sections:
        if library[names + name_at : library.index(b"\0", names + name_at)].decode() == name:
            yield offset, length
