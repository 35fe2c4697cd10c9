"""Reads router.yaml and checks that the names and files in it exist."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from router.config.credentials import ListenCertificate, admin_tokens, check_authority, read_tls
from router.config.load import load, read_document, read_named, read_text, validate_options
from router.config.mistakes import Location
from router.config.models import (
    LinkClass,
    ModelPrior,
    PodPriors,
    all_priors,
    build_links,
    load_link_classes,
    prior_speed,
    with_model_folders,
)
from router.config.names_file import read_names
from router.config.pod_keys import read_key, read_key_variable
from router.config.pod_schema import DiscoveredPods, PodConfig, credential_fields
from router.config.policy_files import load_classes
from router.config.schema import LinksConfig, RouterConfig
from router.config.tenant_file import TenantFile
from router.errors import ConfigError

_KEY = re.compile(r"([a-z_]+(?:\.[a-z_]+)*): ")


class MistakeList:
    """Collects the mistakes in one file, or without a file, so that they are reported together."""

    def __init__(self, path: Path | None) -> None:
        self._document = read_document(path) if path else None
        self._lines: list[str] = []

    @contextmanager
    def at(self, *location: str | int) -> Iterator[None]:
        """Collect the `ConfigError` of this block with the line of `location`."""
        try:
            yield
        except ConfigError as error:
            key, message = _with_key(location, str(error))
            file, line = self._document.place_of(key) if self._document else ("command line", 0)
            self._lines.append(f"{file}:{line}: {'.'.join(map(str, key)) or '(top level)'}: {message}")

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Collect the `ConfigError` of this block, which names another file."""
        try:
            yield
        except ConfigError as error:
            self._lines.append(str(error))

    def add(self, lines: str) -> None:
        """Collect mistakes that have their place already."""
        self._lines += lines.splitlines()

    def report(self) -> None:
        """Raises `ConfigError` if there are mistakes."""
        if self._lines:
            raise ConfigError("\n".join(dict.fromkeys(self._lines)))


def _with_key(location: Location, message: str) -> tuple[Location, str]:
    """The full key and the rest of a message that may begin with a part of the key."""
    found = _KEY.match(message)
    if found is None:
        return location, message
    own = tuple(found[1].split("."))
    common = next(n for n in range(len(own), -1, -1) if location[max(0, len(location) - n) :] == own[:n])
    return (*location, *own[common:]), message[found.end() :]


def load_router(path: Path) -> RouterConfig:
    """The checked configuration. Raises `ConfigError`."""
    config, mistakes = with_model_folders(load(path, RouterConfig)), MistakeList(path)
    check_references(mistakes, config)
    mistakes.report()
    return config


def check_references(mistakes: MistakeList, config: RouterConfig) -> None:
    """Everything that the configuration names must exist, except tokenizers and policies."""
    with mistakes.at("classes"):
        load_classes(config.classes)
    if config.tenants:
        with mistakes.elsewhere():
            TenantFile(Path(config.tenants)).read()
    if config.names:
        with mistakes.elsewhere():
            read_names(Path(config.names), [one.name for one in config.providers])
    with mistakes.at("priors"):
        check_names(mistakes, config, all_priors(config.priors), load_link_classes())
    check_files(mistakes, config)


def check_names(
    mistakes: MistakeList, config: RouterConfig, priors: Mapping[str, ModelPrior], links: Mapping[str, LinkClass]
) -> None:
    for number, model in enumerate(config.models):
        with mistakes.at("models", number, "cost"):
            prior_speed(priors, model.cost_row)
    if all(model.cost_row.model in priors for model in config.models):
        pod_priors = PodPriors(config.models, priors)
        for number, pod in enumerate(config.pods):
            with mistakes.at("pods", number, "hardware"):
                pod_priors.of(pod, ())
    for place in LinksConfig.model_fields:
        with mistakes.at("links", place):
            build_links(LinksConfig(**{place: getattr(config.links, place)}), links)


def check_files(mistakes: MistakeList, config: RouterConfig) -> None:
    """Files that are read at startup must be readable, and the folders of those that are written must exist."""
    check_keys(mistakes, config)
    with mistakes.at("admin", "bearer_file"):
        admin_tokens(config.admin)
    if config.listen.tls:
        with mistakes.at("listen", "tls"):
            ListenCertificate(config.listen.tls)
    for number, model in enumerate(config.models):
        with mistakes.at("models", number, "chat_template"):
            if model.chat_template is not None:
                read_text(Path(model.chat_template))
    check_authorities(mistakes, config)
    tls = config.index.redis.tls if config.index.redis else None
    for key, file in dict(tls or {}).items():
        with mistakes.at("index", "redis", "tls", key):
            if key.endswith("_file") and file is not None:
                read_named(key, file)
    for location, file in (("receipts", "file"), config.receipts.file), (("admin", "socket"), config.admin.socket):
        with mistakes.at(*location):
            _check_writable(".".join(location), file)


def check_keys(mistakes: MistakeList, config: RouterConfig) -> None:
    pods: dict[Location, PodConfig | DiscoveredPods] = {
        **{("pods", number): pod for number, pod in enumerate(config.pods)},
        **{("discovery", *place, "pod"): group for place, group in config.discovery.groups.items()},
    }
    for location, pod in pods.items():
        if pod.auth is not None and pod.auth.bearer_file:
            with mistakes.at(*location, "auth", "bearer_file"):
                read_key(pod.auth.bearer_file)
        if pod.auth is not None and pod.auth.bearer_env:
            with mistakes.at(*location, "auth", "bearer_env"):
                read_key_variable(pod.auth.bearer_env)
        if pod.tls is not None:
            with mistakes.at(*location, "tls"):
                read_tls(credential_fields(pod.auth, pod.tls)["tls"])
    for number, one in enumerate(config.providers):
        with mistakes.at("providers", number, "key_file"):
            read_key(one.key_file, "key_file")
        with mistakes.at("providers", number, "ca_file"):
            read_tls(one.pod.tls)


def check_authorities(mistakes: MistakeList, config: RouterConfig) -> None:
    """The authorities of API servers must be certificates, where the file names them: a pod of the cluster has the
    default, which need not be on the machine of this check."""
    for number, entry in enumerate(config.discovery.kubernetes):
        api = entry.api
        if "ca_file" in api.model_fields_set and api.ca_file and not (api.url or "").startswith("http:"):
            with mistakes.at("discovery", "kubernetes", number, "api", "ca_file"):
                check_authority(api.ca_file)


def _check_writable(key: str, file: str | None) -> None:
    folder = Path(file or "").parent
    if file and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ConfigError(
            f"{key}: cannot write to the folder {folder}; create it, or name another; "
            "a relative path begins at the folder of the configuration file"
        )


def with_redis_url(config: RouterConfig, url: str | None) -> RouterConfig:
    """The configuration with another `index.redis.url`; unchanged without `url`. Raises `ConfigError`."""
    if url is None:
        return config
    data = config.model_dump()
    data["index"]["redis"] = {**(data["index"]["redis"] or {}), "url": url}
    return validate_options(RouterConfig, data)
