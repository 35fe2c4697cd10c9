"""Loads the tokenizer of each configured model and builds its prompt reader."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from random import getrandbits
from typing import Any, TypeAlias

import structlog

from router.config.load import ENGINE_TOKENIZER
from router.config.models import MAX_NAME_CHARACTERS, ModelNames
from router.config.router_file import MistakeList
from router.config.schema import ModelConfig, RouterConfig
from router.config.tokenizer_files import TokenizerSource, load_tokenizer, read_processor
from router.errors import MalformedRequest
from router.frontends.http.upstream import UpstreamPool
from router.frontends.prompt_readers import (
    EnginePromptReader,
    FleetLookups,
    LocalPromptReader,
    NoPromptReader,
    PromptReader,
    ReadThreads,
)
from router.observe.declared import of_requests
from router.observe.metrics import Metrics
from router.prompt.apis.vllm_messages import VllmMessages
from router.prompt.conversation import UnreadReason
from router.prompt.fingerprint import Fingerprinter
from router.prompt.harmony import Harmony
from router.prompt.pictures.picture_reader import PLACEHOLDER, PictureReader, read_sizes
from router.prompt.template import ChatTemplate
from router.prompt.tokenizer import Tokenizer
from router.request.attempt_rules import ContinuationRules
from router.request.continuation.answer_words import AnswerWords, answer_words
from router.types import Endpoint, Generation, InferenceRequest, Pod, PromptPrefix

log = structlog.get_logger()

MAX_RUNTIME_MODELS = 64
"""Models that only pods name and whose prompts are read: each has caches."""
NO_CLIENT = ""
"""Id of a self-test's prompts. Requests of clients always have one."""


LoadTokenizer: TypeAlias = Callable[..., Tokenizer]
"""Has the parameters of `load_tokenizer`. May return a loaded one that several routers of a process share."""


def preloaded(models: Sequence[ModelConfig], mistakes: MistakeList) -> LoadTokenizer:
    """Load all tokenizers now. Returns a function that returns them. Raises `ConfigError` with all mistakes."""
    loaded: dict[tuple[TokenizerSource, bool], Tokenizer] = {}
    for number, model in enumerate(models):
        if model.tokenizer in (None, ENGINE_TOKENIZER) or model.has_folders:
            continue
        source, fast = source_of(model), model.fast_tokenizer
        with mistakes.at("models", number, "tokenizer"):
            if (source, fast) not in loaded:
                log.info("loading tokenizer", model=model.name, tokenizer=source.path)
                loaded[source, fast] = load_tokenizer(source, fast=fast)
    mistakes.report()
    return lambda source, *, fast: loaded[source, fast]


def source_of(model: ModelConfig) -> TokenizerSource:
    assert model.tokenizer is not None
    return TokenizerSource(model.tokenizer, model.chat_template)


def chat_template(
    model: ModelConfig, tokenizer: Tokenizer, *, trusts_uuids: bool = False
) -> ChatTemplate | Harmony | None:
    """None if the model has no template. `trusts_uuids`: as in `PictureReader`. Raises `ConfigError`."""
    if model.chat_format == "harmony":
        return harmony(model, tokenizer)
    if not tokenizer.chat_template:
        return None
    template = ChatTemplate(tokenizer, None, model.chat_template_content_format, model.chat_template_kwargs)
    template.pictures = picture_reader(model, tokenizer, trusts_uuids=trusts_uuids, seed=getrandbits(64))
    return template


def harmony(model: ModelConfig, tokenizer: Tokenizer) -> Harmony:
    """The renderer of a model in the Harmony format. Raises `ConfigError`."""

    def today() -> str:
        return model.harmony_date or f"{datetime.now().astimezone():%Y-%m-%d}"

    return Harmony([token.content for token in tokenizer.added_tokens], today)


def picture_reader(model: ModelConfig, tokenizer: Tokenizer, **options: Any) -> PictureReader | None:
    """None if the family of the model is not known. `options`: further arguments of `PictureReader`."""
    sizes, placeholder = read_sizes(read_processor(source_of(model).path)), tokenizer.encode(PLACEHOLDER)
    return PictureReader(sizes, placeholder[0], **options) if sizes and len(placeholder) == 1 else None


def fingerprinter(
    model: ModelConfig, tokenizer: Tokenizer, template: ChatTemplate | Harmony | None = None, **options: Any
) -> Fingerprinter:
    """`template`: the model's own, if it is compiled already. `options`: further arguments of `Fingerprinter`."""
    template = template or chat_template(model, tokenizer)
    return Fingerprinter(tokenizer, template, model.generation(), max_prompt_tokens=model.max_prompt_tokens, **options)


def continuation_rules(config: RouterConfig, readers: Mapping[str, PromptReader]) -> ContinuationRules | None:
    """How broken streams go on, with the tokenizers of the models; None where they end."""
    enabled = config.continuation.enabled
    if enabled is False:
        return None
    templates = {model.name for model in config.models if model.chat_format == "template"}
    words = {
        name: answer_words(reader.tokenizer.text_of, reader.tokenizer.id_of, reader.fingerprinter.made(VllmMessages))
        for name, reader in readers.items()
        if name in templates and isinstance(reader, LocalPromptReader)
    }
    only_proven, silence_s = enabled == "proven", config.continuation.silence_s
    return ContinuationRules(words_of=words.get, silence_s=silence_s, only_proven=only_proven)


class Prompts:
    """Prompt readers and generations by model name. `ready_pods(model)` returns pods that can tokenize."""

    def __init__(
        self,
        config: RouterConfig,
        pool_of: Callable[[Pod], UpstreamPool],
        ready_pods: Callable[[str], list[Pod]],
        metrics: Metrics,
        load: LoadTokenizer,
        lookups: FleetLookups,
    ) -> None:
        self._lookups = lookups
        self._chat_template = partial(chat_template, trusts_uuids=config.edge.trust_engine_fields)
        self._index = config.index
        self._pool_of = pool_of
        self._ready_pods = ready_pods
        self._metrics = metrics
        self._load = load
        self._unlisted = config.unlisted_models
        self._names = ModelNames(config.models)
        self._threads = ReadThreads()
        self._templates: dict[str, ChatTemplate | Harmony | None] = {}
        """Templates of patterns, by tokenizer. Each is compiled once, which takes milliseconds."""
        self._added: set[str] = set()
        """Models of patterns and unlisted models that have a reader."""
        self.generations: dict[str, Generation] = {}
        self.readers: dict[str, PromptReader] = {}
        self.unlisted = NoPromptReader(self._count_unread)
        for model in config.models:
            if model.is_pattern and model.tokenizer != ENGINE_TOKENIZER and model.tokenizer and not model.has_folders:
                tokenizer = self._load(source_of(model), fast=model.fast_tokenizer)
                self._templates[model.name] = self._chat_template(model, tokenizer)
            elif model.tokenizer and not model.is_pattern:
                self.readers[model.name] = self._reader(model)
        self.continuation = continuation_rules(config, self.readers)

    def words_of(self, model: str) -> AnswerWords | None:
        """The tokens of answers of a model; None where its broken streams end."""
        return self.continuation.words_of(model) if self.continuation else None

    def add_served(self, models: Iterable[str], served: Callable[[], Collection[str]]) -> None:
        """Read prompts of models that a pod serves, if the configuration says how. `served`: models of all pods."""
        for name in models:
            model = None if name in self.readers else self._names.get(name) or self._unlisted_model(name)
            if model is None or not model.tokenizer:
                continue
            if len(self._added) >= MAX_RUNTIME_MODELS:
                self._remove_all_but(served())
            if len(self._added) >= MAX_RUNTIME_MODELS:
                log.error("too many models at run time; routed by load only", model=name, limit=MAX_RUNTIME_MODELS)
                continue
            self._added.add(name)
            self.readers[name] = self._reader(model)

    def _unlisted_model(self, name: str) -> ModelConfig | None:
        engine = self._unlisted == ENGINE_TOKENIZER and len(name) <= MAX_NAME_CHARACTERS
        return ModelConfig(name=name, tokenizer=ENGINE_TOKENIZER) if engine else None

    def _remove_all_but(self, served: Collection[str]) -> None:
        for name in self._added.difference(served):
            del self.readers[name], self.generations[name]
        self._added.intersection_update(served)

    def generation_of(self, models: Iterable[str]) -> Generation | None:
        """The generation of the first of these models that has a tokenizer; None if there is none."""
        return next((self.generations[name] for name in models if name in self.generations), None)

    async def of_probe(self, endpoint: Endpoint, body: Mapping[str, Any]) -> PromptPrefix | None:
        """The router's prefix of a self-test's prompt, read by the same reader as requests."""
        reader = self.readers.get(body["model"])
        if reader is None:
            return None
        request = InferenceRequest(id=NO_CLIENT, endpoint=endpoint, model=body["model"], body=b"", prompt=body)
        try:
            found = await reader.read(request)
        except MalformedRequest:
            return None
        return found if isinstance(found, PromptPrefix) else None

    def unread_reason(self, model: str) -> str:
        """Why the chats of a model that a pod serves are routed by load only; "" if they are not."""
        reader = self.readers.get(model)
        if reader is None:
            return (
                "no tokenizer is configured for the model; add it with its `tokenizer` under `models`, or set"
                " `unlisted_models: engine`"
            )
        if isinstance(reader, LocalPromptReader) and not reader.fingerprinter.renders_chats:
            return "its tokenizer has no chat template; set `chat_template` to the engine's"
        return ""

    def advice(self, model: str, ours: Sequence[int], engine: Sequence[int]) -> str:
        """Why a pod has other tokens of a prompt than the router, and what to do; "" if that is unknown."""
        reader = self.readers.get(model)
        return reader.fingerprinter.advice(ours, engine) if isinstance(reader, LocalPromptReader) else ""

    def cache_bytes(self) -> dict[str, int]:
        """Bytes of the prompt caches by model, estimated. Models that pods tokenize have none."""
        local = ((model, one) for model, one in self.readers.items() if isinstance(one, LocalPromptReader))
        return {model: one.fingerprinter.cache_bytes for model, one in local}

    def _reader(self, model: ModelConfig) -> PromptReader:
        """The reader of this model's prompts. Loading a tokenizer takes a second or two."""
        if model.tokenizer == ENGINE_TOKENIZER:
            generation = self.generations[model.name] = model.generation()
            return EnginePromptReader(
                generation,
                self._pool_of,
                self._ready_pods,
                self._count_unread,
                threads=self._threads,
                readings=self._lookups.readings,
            )
        tokenizer = self._load(source_of(model), fast=model.fast_tokenizer)
        entry = self._names.entry_of(model.name)
        template = (self._templates.get(entry.name) if entry else None) or self._chat_template(model, tokenizer)
        is_exact = template is not None and template.pictures is not None
        pictures = "exact on vLLM" if is_exact else "text in front of the first one"
        log.info(
            "tokenizer loaded",
            model=model.name,
            backend=tokenizer.backend,
            reason=tokenizer.reason,
            pictures=pictures,
        )

        def report_mismatch() -> None:
            self._metrics[of_requests.INCREMENTAL_MISMATCHES].labels(model.name).inc()
            log.error("incremental prompts disabled: tokens differ from the whole prompt", model=model.name)

        reading = fingerprinter(
            model,
            tokenizer,
            template,
            cache_bytes=self._index.tokens_cache_bytes,
            cache_seed=getrandbits(64),
            incremental=self._index.incremental_prompts,
        )
        self.generations[model.name] = reading.generation
        return LocalPromptReader(
            reading,
            tokenizer,
            self._count_unread,
            threads=self._threads,
            lookups=self._lookups,
            on_mismatch=report_mismatch,
        )

    def _count_unread(self, request: InferenceRequest, reason: UnreadReason, details: str) -> None:
        """Count a request that is routed without a prefix, and log the first one of each reason."""
        if request.id == NO_CLIENT:
            return
        counter = self._metrics[of_requests.UNREAD_PROMPTS].labels(request.model, reason.value)
        if not counter.value:
            log.warning(
                "prompt routed without prefix matching", model=request.model, reason=reason.value, details=details
            )
        counter.inc()
