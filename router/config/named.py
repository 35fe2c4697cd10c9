"""Does everything exist that router.yaml names?

Cost priors and classes of links stand in files of their own. A name that none of them has is a mistake in the
line that says it. This file never builds anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from router.config.links import LinkClass, LinksConfig, build_links
from router.config.load import read_document
from router.config.priors import prior_of, prior_speed
from router.config.schema import ModelPrior, RouterConfig
from router.errors import ConfigError


def check_names(
    path: Path,
    config: RouterConfig,
    priors: Mapping[str, ModelPrior],
    links: Mapping[str, LinkClass],
) -> None:
    """Raises `ConfigError` with the line of the first name that nothing has."""
    for number, model in enumerate(config.models):
        with _at(path, "models", number, "cost"):
            prior_speed(priors, model.cost)
    for number, pod in enumerate(config.pods):
        with _at(path, "pods", number, "hardware"):
            for model in config.models:
                prior_of(priors, model.cost, pod)
    for place in LinksConfig.model_fields:
        with _at(path, "links", place):
            build_links(LinksConfig(**{place: getattr(config.links, place)}), links)


@contextmanager
def _at(path: Path, *location: str | int) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}:{read_document(path).line_of(location)}: {error}") from error
