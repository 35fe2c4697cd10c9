"""Finds the mistakes of a configuration that only show when its tokenizers and policies are loaded."""

from __future__ import annotations

from pathlib import Path

from router.addresses import split_url
from router.config.load import ENGINE_TOKENIZER, load_valid, read_document, read_text
from router.config.models import all_priors, load_link_classes, with_model_folders
from router.config.policy_files import PolicyFolder, PolicyLibrary, check, load_classes
from router.config.router_file import MistakeList, check_names, check_references
from router.config.schema import ModelConfig, RouterConfig
from router.config.tokenizer_files import TokenizerSource, is_local, load_tokenizer
from router.engines.forwarded_paths import api_end
from router.errors import ConfigError
from router.frontends.prompts import harmony
from router.policy.policy_set import PolicySet
from router.prompt.template import ChatTemplate
from router.stores.redis_connection import read_credentials


def check_router(path: Path, policies: Path, *, offline: bool, files: bool = True) -> tuple[RouterConfig, PolicySet]:
    """The configuration and its policies, after everything was loaded once; `offline`: but tokenizers of the hub;
    without `files`: but files, keys and folders of its machine. Raises `ConfigError` with all mistakes."""
    mistakes = MistakeList(path)
    config, wrong = load_valid(path, RouterConfig)
    mistakes.add(wrong)
    _check_addresses(mistakes, path, config)
    if not files:
        check_names(mistakes, config, all_priors(None), load_link_classes())
        _check_policies(mistakes, config.model_copy(update={"classes": None}), policies)
        mistakes.report()
        return config, PolicyFolder(policies, config.policy, load_classes(None).names).read()
    with mistakes.elsewhere():
        config = with_model_folders(config)
    check_references(mistakes, config)
    for number, model in enumerate(config.models):
        place = model.tokenizer
        if place and place != ENGINE_TOKENIZER and not model.has_folders and (is_local(place) or not offline):
            _check_prompts(mistakes, number, model, place)
    if config.index.redis:
        with mistakes.at("index", "redis"):
            read_credentials(config.index.redis)
    _check_policies(mistakes, config, policies)
    mistakes.report()
    return config, PolicyFolder(policies, config.policy, load_classes(config.classes).names).read()


def _check_prompts(mistakes: MistakeList, number: int, model: ModelConfig, place: str) -> None:
    with mistakes.at("models", number, "tokenizer"):
        tokenizer = load_tokenizer(TokenizerSource(place), fast=False)
        own = model.chat_template
        if model.chat_format == "harmony":
            with mistakes.at("models", number, "chat_format"):
                harmony(model, tokenizer)
            return
        with mistakes.at("models", number, "chat_template"):
            if Path(own).is_file() if own else tokenizer.chat_template:
                template = read_text(Path(own)) if own else None
                ChatTemplate(tokenizer, template, model.chat_template_content_format, model.chat_template_kwargs)


def _check_policies(mistakes: MistakeList, config: RouterConfig, folder: Path) -> None:
    """Each policy of the folder must be valid, and the default policy exist."""
    library = PolicyLibrary(folder)
    with mistakes.at("policy"):
        library.known(config.policy)
    classes = None
    with mistakes.at("classes"):
        classes = load_classes(config.classes).names
    for name in library.own:
        with mistakes.elsewhere():
            check(library, name, classes)


def _check_addresses(mistakes: MistakeList, path: Path, config: RouterConfig) -> None:
    """What is valid, but hardly meant: an empty file, a pod at the port of web servers or at a path of the API."""
    with mistakes.at():
        if not read_document(path).data:
            raise ConfigError(
                "the file is empty; name pods under `pods` or `discovery`, as `warmroute config show` does"
            )
    for number, pod in enumerate(config.pods):
        with mistakes.at("pods", number, "url"):
            if pod.url.startswith("http:") and split_url(pod.url).port is None:
                raise ConfigError("no port; write the engine's, such as :8000, or :80")
            if end := api_end(split_url(pod.url).path):
                raise ConfigError(f"ends with {end}, which the router appends; write {pod.url.removesuffix(end)}")
