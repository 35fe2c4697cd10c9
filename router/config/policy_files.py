"""Which policies are there, and which are in force?

Reads a folder of policy files and the folders in it, lays each over the one that it extends, and builds the whole set
or nothing; a mistake names file, line and key. A name that the folder does not have is looked up among the shipped
policies, so that a folder of one's own holds only what differs. This file never decides a request.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router.config.load import Document, load, nearest, plain, read_document, validate
from router.config.shipped import shipped
from router.errors import ConfigError
from router.policy.classes import ClassRules
from router.policy.policy_set import PolicySet, policy_set
from router.policy.spec import Policy, PolicySpec

NOT_INHERITED = ("match", "percent", "shadow")
"""What a file says of its own use, not of how it decides."""


@dataclass(frozen=True, slots=True)
class PolicyFolder:
    """Where policies are read from, again and again. `default` is the policy of all requests that no other matches;
    `classes` are the workload classes that a `match` may name, None for any."""

    folder: Path
    default: str
    classes: Collection[str] | None = None

    def read(self) -> PolicySet:
        """Everything that is in force. Raises `ConfigError`."""
        shelf = Shelf(self.folder)
        policies = {name: shelf.policy(name) for name in (*shelf.own, shelf.known(self.default))}
        for name in policies:
            check(shelf, name, self.classes)
        shadows = {policy.shadow.policy for policy in policies.values() if policy.shadow}
        beside = {name: shelf.policy(name) for name in shadows}
        return policy_set(policies[self.default], (policies | beside).values())

    def stamp(self) -> object:
        """Equal as long as nothing in the folder has changed: no name, content, or target of a link."""
        stats = ((path, Path(path).stat()) for path in _files(self.folder))
        return tuple((path, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size) for path, stat in stats)


class Shelf:
    """The policy files of a folder, and the shipped ones behind them; each is read once. A file may extend the shipped
    one of its own name.

    `spec` is the model that a file must follow, and `behind` replaces the shipped files."""

    def __init__(self, folder: Path, *, spec: type[PolicySpec] = PolicySpec, behind: Shelf | None = None) -> None:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: there is no such folder of policies")
        self.own = policy_files(folder)
        if behind is None and folder != shipped("policies"):
            behind = Shelf(shipped("policies"))
        self._behind = behind
        self._spec = spec
        self._files: dict[str, Path] = {**(behind._files if behind else {}), **self.own}
        self._documents: dict[str, Document] = {}
        self._specs: dict[str, PolicySpec] = {}

    def policy(self, name: str) -> Policy:
        """Ready to decide. Raises `ConfigError`."""
        return self.spec(name).build()

    def spec(self, name: str) -> PolicySpec:
        """What the file says together with what it extends. Raises `ConfigError`."""
        if name not in self._specs:
            document = self.document(name)
            spec = validate(document, self._spec, self._resolved(name, ()))
            if spec.name != document.path.stem:
                raise _at(document, ("name",), f"{spec.name!r} must equal the file's name")
            self._specs[name] = spec
        return self._specs[name]

    def document(self, name: str) -> Document:
        """The file as it was read."""
        if name not in self._documents:
            self._documents[name] = read_document(self._files[self.known(name)])
        return self._documents[name]

    def known(self, name: str, asked_by: Document | None = None, *key: str) -> str:
        """The name, or a `ConfigError` at that key that says which was probably meant."""
        if name in self._files:
            return name
        says = f"there is no policy {name!r}{nearest(name, self._files)}; known: {', '.join(sorted(self._files))}"
        raise _at(asked_by, key, says) if asked_by else ConfigError(f"policy: {says}")

    def _resolved(self, name: str, below: tuple[str, ...]) -> Any:
        """Plain data: the file laid over what it extends."""
        document = self.document(name)
        own = plain(document.data)
        extended = own.get("extends") if isinstance(own, dict) else None
        if not isinstance(extended, str):
            return own
        self.known(extended, document, "extends")
        shelf, below = self, (*below, name)
        if extended == name and self._behind and name in self._behind._files:
            shelf, below = self._behind, ()
        elif extended in below:
            raise _at(document, ("extends",), f"in a circle: {' extends '.join((*below, extended))}")
        inherited = shelf._resolved(extended, below)
        shelf.spec(extended)  # a mistake there is told with its own file and line
        return laid_over({key: value for key, value in inherited.items() if key not in NOT_INHERITED}, own)


def check(shelf: Shelf, name: str, classes: Collection[str] | None = None) -> None:
    """Is the file right, and is everything there that it names? Raises `ConfigError`."""
    spec, document = shelf.spec(name), shelf.document(name)
    if spec.shadow:
        shelf.known(spec.shadow.policy, document, "shadow", "policy")
    wanted = spec.match.workload_class if spec.match and classes is not None else None
    for missing in sorted(set(wanted or ()) - set(classes or ())):
        known = ", ".join(sorted(classes or ()))
        says = f"there is no class {missing!r}{nearest(missing, classes or ())}; known: {known}"
        raise _at(document, ("match", "class"), says)


def laid_over(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`own` over `base`, mapping by mapping. None takes away what `base` says; another picker replaces its picker."""
    merged = dict(base)
    for key, value in own.items():
        old = base.get(key)
        if value is None and key in base:
            del merged[key]
        elif isinstance(value, dict) and isinstance(old, dict):
            merged[key] = laid_over({} if key == "picker" and old.keys() != value.keys() else old, value)
        else:
            merged[key] = value
    return merged


def policy_files(folder: Path) -> dict[str, Path]:
    """By name: those of the folder, then those one folder deeper. Raises `ConfigError` where two are alike."""
    files: dict[str, Path] = {}
    for path in map(Path, _files(folder)):
        if path.stem in files:
            raise ConfigError(f"{path}:1: name: there is another policy {path.stem!r}")
        files[path.stem] = path
    return files


def _files(folder: str | Path) -> list[str]:
    """Of the folder, then of those one folder deeper. Looked up twice a second: `Path.glob` takes ten times
    as long.

    A name with a leading dot is none of ours: a mounted ConfigMap keeps its versions in such folders."""
    folders, files = _listed(folder)
    return [*files, *(file for deeper in folders for file in _listed(deeper)[1])]


def _listed(folder: str | Path) -> tuple[list[str], list[str]]:
    """(folders, policy files) in it, each in order; nothing where it has just gone."""
    folders, files = [], []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.name.endswith(".yaml"):
                files.append(entry.path)
            elif entry.is_dir():
                folders.append(entry.path)
    return sorted(folders), sorted(files)


def load_classes(file: str | None) -> ClassRules:
    """The workload classes of a file; by default the shipped ones. Raises `ConfigError`."""
    return load(Path(file) if file else shipped("config") / "classes.yaml", ClassRules)


def load_policies(folder: Path, spec: type[PolicySpec] = PolicySpec) -> dict[str, Policy]:
    """All policies of a folder by name. A file must be named after the policy that it describes, and no two alike."""
    shelf = Shelf(folder, spec=spec)
    return {name: shelf.policy(name) for name in shelf.own}


def find_policy(policies: Mapping[str, Policy], name_or_file: str) -> Policy:
    """The policy of that name, or of that YAML file. Raises `ConfigError`."""
    if name_or_file.endswith((".yaml", ".yml")):
        path = Path(name_or_file)
        return Shelf(path.parent).policy(path.stem)
    return choose_policy(policies, name_or_file)


def choose_policy(policies: Mapping[str, Policy], name: str) -> Policy:
    """The policy of that name, or a `ConfigError` that lists the others."""
    if name not in policies:
        known = ", ".join(sorted(policies))
        raise ConfigError(f"policy: there is no policy {name!r}{nearest(name, policies)}; known: {known}")
    return policies[name]


def _at(document: Document, key: tuple[str, ...], says: str) -> ConfigError:
    """A mistake at a key of a document."""
    return ConfigError(f"{document.path}:{document.line_of(key)}: {'.'.join(key)}: {says}")
