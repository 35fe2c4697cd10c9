"""Validates objects against the OpenAPI schemas of Kubernetes, which the package kubernetes-validate contains."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

CUSTOM = {
    "monitoring.coreos.com",
    "keda.sh",
    "gateway.networking.k8s.io",
    "inference.networking.k8s.io",
    "cloud.google.com",
    "networking.gke.io",
}
"""API groups of custom resources; Kubernetes itself has no schema for them."""


def _read(version: str, name: str) -> Any:
    folder = resources.files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict"
    return json.loads((folder / name).read_text(encoding="utf-8"))


@cache
def _registry(version: str) -> Registry[Any]:
    return Resource.from_contents(_read(version, "_definitions.json")) @ Registry()


@cache
def _validator(version: str, kind: str, api: str) -> Draft202012Validator:
    group, _, api_version = api.rpartition("/")
    name = f"{kind.lower()}-{group.split('.')[0] + '-' if group else ''}{api_version}.json"
    return Draft202012Validator(_read(version, name), registry=_registry(version))


def is_custom(one: dict[str, Any]) -> bool:
    return one["apiVersion"].split("/")[0] in CUSTOM


def mistakes(version: str, one: dict[str, Any]) -> list[str]:
    """What the API server of this version, such as 1.37, would refuse or warn about."""
    name = f"{one['kind']} {one['metadata']['name']}"
    return [
        f"{name}: {error.json_path}: {error.message[:200]}"
        for error in _validator(version, one["kind"], one["apiVersion"]).iter_errors(one)
    ]
