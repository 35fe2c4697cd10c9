"""Packs vLLM, this router and what both need for a machine with a GPU and without a network.

    python -m loadtest.gpu.pack --out .gpu

Downloads the wheels of `packages.txt`, removes what one GPU cannot use (`cubins.py`), and writes pieces of
an archive, which `run.sh` joins there. vLLM's 300 MB become 25. Needs `uv` and `xz`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).parents[2]))

from loadtest.gpu.cubins import slim

PACKAGES = Path(__file__).with_name("packages.txt")
UNUSED = (
    "vllm/vllm_flash_attn/_vllm_fa2_C*",  # for GPUs before Hopper
    "vllm/vllm-rs",
    "vllm/_qutlass_C*",
    "vllm/_flashmla*",
    "vllm/third_party/fmha_sm100/*",
    "vllm/third_party/tml_fa4/*",
    "vllm/third_party/deep_gemm/*",
    "mistral_common/data/*",
    "pycountry/locales/*",
    "*/swagger-ui*",
)
"""Files that no measurement loads, as patterns of their paths."""
LIBRARIES = (
    "vllm/_C_stable_libtorch.abi3.so",
    "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
)


def main(
    out: Annotated[Path, typer.Option(help="Folder for the pieces; emptied first.")] = Path(".gpu"),
    piece_mib: Annotated[int, typer.Option(help="Largest size of a piece.")] = 48,
    architecture: Annotated[int, typer.Option(help="Ten times the GPU's compute capability; 90 is Hopper.")] = 90,
    python: Annotated[str, typer.Option(help="Python version of that machine.")] = "3.12",
) -> None:
    """Write the pieces and say how large they are."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with TemporaryDirectory(prefix="warmroute-gpu-") as name:
        site = Path(name) / "site"
        _download(site, python)
        _remove_unused(site)
        for library in LIBRARIES:
            path = site / library
            path.write_bytes(slim(path.read_bytes(), architecture, _is_for_bf16))
        archive = Path(name) / "site.tar.xz"
        print(f"compressing {_mib(site):.0f} MiB", flush=True)
        archived = ["--file", str(archive), "--directory", str(site), "."]
        command = ["tar", "--create", "--use-compress-program=xz -T0 -4", *archived]
        subprocess.run(command, check=True)
        for number, piece in enumerate(_pieces(archive, piece_mib << 20)):
            (out / f"site.tar.xz.{number:02}").write_bytes(piece)
            print(f"piece {number}: {len(piece) / (1 << 20):.1f} MiB")


def _download(site: Path, python: str) -> None:
    """Unpack the wheels for that Python on x86-64 Linux, without their dependencies."""
    print("downloading wheels", flush=True)
    target = ["--target", str(site), "--python-version", python, "--python-platform", "x86_64-manylinux_2_35"]
    command = ["uv", "pip", "install", "-q", "--no-deps", "--only-binary", ":all:", *target, "-r", str(PACKAGES)]
    subprocess.run(command, check=True)


def _remove_unused(site: Path) -> None:
    for path in list(site.rglob("*")):
        if path.is_file() and any(fnmatch(str(path.relative_to(site)), pattern) for pattern in UNUSED):
            path.unlink()


def _is_for_bf16(code: bytes) -> bool:
    """All but the attention kernels of Hopper for other types than bfloat16."""
    other = b"half_t" in code or b"float_e4m3" in code
    return not (b"FlashAttnFwdSm90" in code and other)


def _pieces(archive: Path, size: int) -> Iterator[bytes]:
    with archive.open("rb") as file:
        while piece := file.read(size):
            yield piece


def _mib(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / (1 << 20)


if __name__ == "__main__":
    typer.run(main)
