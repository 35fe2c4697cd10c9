"""Reads policy files and builds the set of active policies.

Each file of a folder and its subfolders is merged with the file that it extends. An error names file, line and key.
Names that the folder lacks refer to the shipped policies, so a folder needs only the files that differ.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from router.config.load import Document, load, plain, read_document, shipped, validate
from router.config.mistakes import nearest
from router.config.watched_file import stamp_of
from router.errors import ConfigError
from router.policy.classes import ClassRules
from router.policy.policy_set import PolicySet, policy_set
from router.policy.spec import Policy, PolicySpec

NOT_INHERITED = ("match", "percent")
"""Keys that select when a policy is used; a file that extends it does not inherit them."""


@dataclass(frozen=True, slots=True)
class PolicyFolder:
    """A folder of policies. `default`: the policy of requests that match no other; `classes`: the workload classes that
    a `match` may name, None for any."""

    folder: Path
    default: str
    classes: Collection[str] | None = None

    def read(self) -> PolicySet:
        """The active policies. Raises `ConfigError`."""
        library = PolicyLibrary(self.folder)
        policies = {name: library.policy(name) for name in (*library.own, library.known(self.default))}
        for name in policies:
            check(library, name, self.classes)
        return policy_set(policies[self.default], policies.values())

    def stamp(self) -> object:
        """A value that changes with any name, content or link target in the folder."""
        return tuple((path, stamp_of(path)) for path in _files(self.folder))


class PolicyLibrary:
    """The policy files of a folder; for names it lacks, those of `fallback`, by default the shipped ones. A file may
    extend the fallback's policy of its own name. `spec` validates the files, each of which is read once."""

    def __init__(
        self, folder: Path, *, spec: type[PolicySpec] = PolicySpec, fallback: PolicyLibrary | None = None
    ) -> None:
        if not folder.is_dir():
            raise ConfigError(f"{folder}: policy folder not found")
        self.own = policy_files(folder)
        if fallback is None and folder != shipped("policies"):
            fallback = PolicyLibrary(shipped("policies"))
        self._fallback = fallback
        self._spec = spec
        self._files: dict[str, Path] = {**(fallback._files if fallback else {}), **self.own}
        self._documents: dict[str, Document] = {}
        self._specs: dict[str, PolicySpec] = {}

    def policy(self, name: str) -> Policy:
        """A policy that is ready to decide. Raises `ConfigError`."""
        return self.spec(name).build()

    def spec(self, name: str) -> PolicySpec:
        """The file merged with the one it extends. Raises `ConfigError`."""
        if name not in self._specs:
            document = self.document(name)
            spec = validate(document, self._spec, self._resolved(name, ()))
            if spec.name != document.path.stem:
                raise _at(document, ("name",), f"{spec.name!r} must equal the file's name")
            self._specs[name] = spec
        return self._specs[name]

    def document(self, name: str) -> Document:
        if name not in self._documents:
            self._documents[name] = read_document(self._files[self.known(name)], is_watched=True)
        return self._documents[name]

    def known(self, name: str, document: Document | None = None, *key: str) -> str:
        """The name, if it is known. Raises `ConfigError` at `key` of `document`, with a suggestion."""
        if name in self._files:
            return name
        message = unknown(name, self._files)
        raise _at(document, key, message) if document else ConfigError(f"policy: {message}")

    def _resolved(self, name: str, below: tuple[str, ...]) -> Any:
        """The merged file as plain data. `below`: names of the files that extend it."""
        document = self.document(name)
        own = plain(document.data)
        extended = own.get("extends") if isinstance(own, dict) else None
        if not isinstance(extended, str):
            return own
        self.known(extended, document, "extends")
        library, below = self, (*below, name)
        if extended == name and self._fallback and name in self._fallback._files:
            library, below = self._fallback, ()
        elif extended in below:
            raise _at(document, ("extends",), f"circular: {' extends '.join((*below, extended))}")
        inherited = library._resolved(extended, below)
        library.spec(extended)  # reports an error there with its own file and line
        return merged_with({key: value for key, value in inherited.items() if key not in NOT_INHERITED}, own)


def check(library: PolicyLibrary, name: str, classes: Collection[str] | None = None) -> None:
    """Check a policy and the policies and classes that it names. Raises `ConfigError`."""
    spec, document = library.spec(name), library.document(name)
    if classes is not None and spec.match:
        for missing in sorted(set(spec.match.workload_class or ()) - set(classes)):
            raise _at(document, ("match", "class"), unknown(missing, classes, "class"))


def merged_with(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`base` overridden by `own`, recursively. None removes a key; another kind of picker replaces the picker."""
    merged = dict(base)
    for key, value in own.items():
        old = base.get(key)
        if value is None and key in base:
            del merged[key]
        elif isinstance(value, dict) and isinstance(old, dict):
            merged[key] = merged_with({} if key == "picker" and old.keys() != value.keys() else old, value)
        else:
            merged[key] = value
    return merged


def policy_files(folder: Path) -> dict[str, Path]:
    """Policy files by name: of the folder, then of its subfolders. Raises `ConfigError` for duplicates."""
    files: dict[str, Path] = {}
    for path in _files(folder):
        if path.stem in files:
            raise ConfigError(f"{path}:1: name: duplicate policy {path.stem!r}, also in {files[path.stem]}")
        files[path.stem] = path
    return files


def _files(folder: Path) -> list[Path]:
    """Those of the folder, then of its subfolders, without names with a leading dot: versions of a ConfigMap."""
    visible = "[!.]*"
    return [*sorted(folder.glob(f"{visible}.yaml")), *sorted(folder.glob(f"{visible}/{visible}.yaml"))]


def load_classes(file: str | None) -> ClassRules:
    """The workload classes of a file, by default the shipped one. Raises `ConfigError`."""
    return load(Path(file) if file else shipped("config") / "classes.yaml", ClassRules)


def load_policies(folder: Path, spec: type[PolicySpec] = PolicySpec) -> dict[str, Policy]:
    """All policies of a folder by name. Raises `ConfigError`."""
    library = PolicyLibrary(folder, spec=spec)
    return {name: library.policy(name) for name in library.own}


def find_policy(policies: Mapping[str, Policy], name_or_file: str) -> Policy:
    """The policy of that name or YAML file. Raises `ConfigError`."""
    if name_or_file.endswith((".yaml", ".yml")):
        path = Path(name_or_file)
        return PolicyLibrary(path.parent).policy(path.stem)
    if name_or_file not in policies:
        raise ConfigError(f"policy: {unknown(name_or_file, policies)}")
    return policies[name_or_file]


def unknown(name: str, known: Collection[str], kind: str = "policy") -> str:
    return f"unknown {kind} {name!r}{nearest(name, known)}; known: {', '.join(sorted(known))}"


def _at(document: Document, key: tuple[str, ...], message: str) -> ConfigError:
    return ConfigError(f"{document.path}:{document.line_of(key)}: {'.'.join(key)}: {message}")


def policy_spec(name: str) -> PolicySpec:
    """The policy with this name; if it ends in `.yaml`, that of a file. Raises `ConfigError`."""
    if not name.endswith(".yaml"):
        return PolicyLibrary(shipped("policies")).spec(name)
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"{path}: file not found")
    return PolicyLibrary(path.resolve().parent).spec(path.stem)
