"""Finds the mistakes of a configuration that only show when its tokenizers and policies are loaded."""

from __future__ import annotations

from pathlib import Path

from router.config.load import ENGINE_TOKENIZER, load
from router.config.model_names import with_model_folders
from router.config.policy_files import PolicyFolder, PolicyLibrary, check, load_classes
from router.config.router_file import MistakeList, check_references
from router.config.schema import ModelConfig, RouterConfig
from router.policy.policy_set import PolicySet
from router.prompt.template import ChatTemplate
from router.wiring.prompts import harmony
from router.wiring.tokenizer_files import TokenizerSource, is_local, load_tokenizer, read_template


def check_router(path: Path, policies: Path, *, offline: bool) -> tuple[RouterConfig, PolicySet]:
    """The configuration and its active policies, after everything was loaded once; `offline`: except tokenizers of the
    hub. Raises `ConfigError` with all mistakes."""
    config, mistakes = with_model_folders(load(path, RouterConfig)), MistakeList(path)
    check_references(mistakes, config)
    for number, model in enumerate(config.models):
        place = model.tokenizer
        if place and place != ENGINE_TOKENIZER and not model.has_folders and (is_local(place) or not offline):
            _check_prompts(mistakes, number, model, place)
    _check_policies(mistakes, config, policies)
    mistakes.report()
    return config, PolicyFolder(policies, config.policy, load_classes(config.classes).names).read()


def _check_prompts(mistakes: MistakeList, number: int, model: ModelConfig, place: str) -> None:
    """The tokenizer must load, and the chat template compile."""
    with mistakes.at("models", number, "tokenizer"):
        tokenizer = load_tokenizer(TokenizerSource(place), fast=False)
        own = model.chat_template
        if model.chat_format == "harmony":
            with mistakes.at("models", number, "chat_format"):
                harmony(model, tokenizer)
            return
        with mistakes.at("models", number, "chat_template"):
            if Path(own).is_file() if own else tokenizer.chat_template:
                template = read_template(own) if own else None
                ChatTemplate(tokenizer, template, model.chat_template_content_format, model.chat_template_kwargs)


def _check_policies(mistakes: MistakeList, config: RouterConfig, folder: Path) -> None:
    """Each policy of the folder must be valid, and the default policy exist."""
    library = PolicyLibrary(folder)
    with mistakes.at("policy"):
        library.known(config.policy)
    with mistakes.at("classes"):
        classes = load_classes(config.classes).names
        for name in library.own:
            with mistakes.elsewhere():
                check(library, name, classes)
