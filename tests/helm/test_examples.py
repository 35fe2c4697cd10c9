"""Every example values file renders to valid objects and a valid configuration of the router."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from router.cli.config_check import check_router
from router.config.load import load
from router.config.schema import RouterConfig
from tests.helm.charts import EXAMPLES, Object, example
from tests.helm.kubernetes_schemas import is_custom, mistakes
from tests.helm.mounted_files import build

VERSIONS = ("1.31", "1.37")
pytestmark = pytest.mark.parametrize("name", EXAMPLES)


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_are_valid_in_kubernetes(name: str, version: str) -> None:
    objects = [one for one in example(name).objects if not is_custom(one)]
    assert objects
    assert not [mistake for one in objects for mistake in mistakes(version, one)]


def test_objects_have_unique_names(name: str) -> None:
    names = [(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in example(name).objects]
    assert len(names) == len(set(names))


def test_the_router_accepts_its_mounted_configuration(name: str, tmp_path: Path) -> None:
    rendered = example(name)
    pod = rendered.one("Deployment", "router")["spec"]["template"]["spec"]
    build(rendered, pod, "router", tmp_path)
    [router] = [one for one in pod["containers"] if one["name"] == "router"]
    paths = dict(argument.split("=") for argument in router["args"] if "=" in argument)
    config, policies = (tmp_path / paths[key].lstrip("/") for key in ("--config", "--policies"))
    parsed, _ = check_router(config, policies, offline=True)
    served = parsed.picker.port if router["args"][0] == "picker" else parsed.listen.port
    assert {"listen": served, "admin": parsed.admin.port} == {
        "listen": router["ports"][0]["containerPort"],
        "admin": router["ports"][1]["containerPort"],
    }


def test_where_alerts_are_installed_each_model_has_an_slo(name: str) -> None:
    """Without one, WarmrouteSloMissed cannot fire."""
    if example(name).all("PrometheusRule"):
        models = example(name).router_config["models"]
        assert models and all(model.get("slo") for model in models)


def test_publishers_accept_the_configuration_of_sidecars(name: str, tmp_path: Path) -> None:
    path = tmp_path / "sidecar.yaml"
    path.write_text(example(name).one("ConfigMap", suffix="r-warmroute")["data"]["sidecar.yaml"])
    assert load(path, RouterConfig).admin.bearer_file is None


def test_services_select_pods_and_lead_to_their_ports(name: str) -> None:
    rendered = example(name)
    templates = [one["spec"]["template"] for kind in ("Deployment", "StatefulSet") for one in rendered.all(kind)]
    for service in rendered.all("Service"):
        selector = service["spec"]["selector"]
        selected = [one for one in templates if selector.items() <= one["metadata"]["labels"].items()]
        assert len(selected) == 1, service["metadata"]["name"]
        ports = {port["name"] for one in selected[0]["spec"]["containers"] for port in one["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_volumes_are_mounted_and_mounts_have_volumes(name: str) -> None:
    for pod, spec in example(name).pods():
        volumes = [volume["name"] for volume in spec.get("volumes", [])]
        containers = [*spec["containers"], *spec.get("initContainers", [])]
        mounts = {mount["name"] for one in containers for mount in one.get("volumeMounts", [])}
        assert len(volumes) == len(set(volumes)), pod
        assert mounts == set(volumes), pod


def _is_restricted(spec: Object, container: dict[str, Any]) -> bool:
    """The level `restricted` of the Pod Security Standards, and a read-only root."""
    own = {**spec.get("securityContext", {}), **container.get("securityContext", {})}
    return (
        own.get("runAsNonRoot") is True
        and own.get("seccompProfile") == {"type": "RuntimeDefault"}
        and own.get("allowPrivilegeEscalation") is False
        and own.get("capabilities") == {"drop": ["ALL"]}
        and own.get("readOnlyRootFilesystem") is True
        and not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    )


def test_every_container_is_restricted_except_vllm(name: str) -> None:
    """The image of vLLM runs as root."""
    for pod, spec in example(name).pods():
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert "vllm" in container.get("command", []) or _is_restricted(spec, container), (pod, container["name"])


def test_only_pods_that_read_the_api_have_its_token(name: str) -> None:
    discovers = bool(example(name).router_config.get("discovery", {}).get("kubernetes"))
    for pod, spec in example(name).pods():
        needs = discovers and spec["containers"][0]["name"] in ("router", "publisher")
        assert spec["automountServiceAccountToken"] is needs, pod


def test_streams_outlive_the_stop_of_their_pods(name: str) -> None:
    rendered = example(name)
    limits = rendered.router_config["limits"]
    for pod, spec in rendered.pods():
        if spec["containers"][0]["name"] == "router":
            assert spec["terminationGracePeriodSeconds"] > limits["drain_timeout_s"] + limits["drain_delay_s"], pod
        if spec["containers"][0]["name"] == "engine":
            *_, seconds = spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
            assert spec["terminationGracePeriodSeconds"] > int(seconds) >= limits["drain_timeout_s"], pod
