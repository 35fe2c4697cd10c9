"""Reads router.yaml and checks that the cost priors and link classes that it names exist."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from router.config.bearer_file import admin_tokens
from router.config.links import LinkClass, LinksConfig, build_links, load_link_classes
from router.config.load import load, read_document, validate_options
from router.config.pod_keys import read_key
from router.config.priors import ModelPrior, PodPriors, all_priors, prior_speed
from router.config.schema import RouterConfig
from router.errors import ConfigError


def load_router(path: Path) -> RouterConfig:
    """The checked configuration. Raises `ConfigError`."""
    config = load(path, RouterConfig)
    check_names(path, config, all_priors(config.priors), load_link_classes())
    return config


def check_names(
    path: Path, config: RouterConfig, priors: Mapping[str, ModelPrior], links: Mapping[str, LinkClass]
) -> None:
    """Raises `ConfigError` with the line of the first name that does not exist."""
    for number, model in enumerate(config.models):
        with _at(path, "models", number, "cost"):
            prior_speed(priors, model.cost)
    pod_priors = PodPriors(config.models, priors)
    for number, pod in enumerate(config.pods):
        with _at(path, "pods", number, "hardware"):
            pod_priors.of(pod, ())
    check_pod_keys(path, config)
    with _at(path, "admin", "bearer_file"):
        admin_tokens(config.admin)
    for place in LinksConfig.model_fields:
        with _at(path, "links", place):
            build_links(LinksConfig(**{place: getattr(config.links, place)}), links)


def check_pod_keys(path: Path, config: RouterConfig) -> None:
    """Raises `ConfigError` with the line of the first credential file that cannot be read."""
    for number, pod in enumerate(config.pods):
        if pod.auth is not None:
            with _at(path, "pods", number, "auth", "bearer_file"):
                read_key(pod.auth.bearer_file)


def with_redis_url(config: RouterConfig, url: str | None) -> RouterConfig:
    """The configuration with another `index.redis.url`; unchanged without `url`. Raises `ConfigError`."""
    if url is None:
        return config
    data = config.model_dump()
    data["index"]["redis"] = {**(data["index"]["redis"] or {}), "url": url}
    return validate_options(RouterConfig, data)


@contextmanager
def _at(path: Path, *location: str | int) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}:{read_document(path).line_of(location)}: {error}") from error
