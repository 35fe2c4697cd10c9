"""What SGLang's own Python does with requests and prompts, without its kernels.

Runs in the environment of SGLang alone. With `tokens MODEL_FOLDER` it reads lines {"endpoint", "body"} and writes the
tokens of each prompt, or null where SGLang refuses the body. With `events` it writes the frames that SGLang's publisher
sends for a small life of its radix cache, in base64, with what was done before each.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import sys
import types
from array import array
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

PAGE_TOKENS = 16


class _Stub(types.ModuleType):
    """A package that is not installed: every name in it exists and does nothing."""

    __path__ = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = sys.modules[f"{self.__name__}.{name}"] = _Stub(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value

    def __call__(self, *given: Any, **named: Any) -> Any:
        return given[0] if len(given) == 1 and callable(given[0]) and not named else self

    def __mro_entries__(self, _bases: object) -> tuple[type, ...]:
        return (object,)

    def __getitem__(self, _key: object) -> Any:
        return self


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages in `missing`."""

    def __init__(self) -> None:
        self.missing: set[str] = set()

    def find_spec(self, name: str, _path: object, _target: object = None) -> importlib.machinery.ModuleSpec | None:
        known = name.partition(".")[0] in self.missing
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


_STUBS = _Stubs()


def imported(name: str) -> Any:
    """A module of SGLang. Each package that it misses is replaced by a stub."""
    while True:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            root = (error.name or "").partition(".")[0]
            if root in ("", "sglang", *_STUBS.missing):
                raise
            _STUBS.missing.add(root)
            for known in [each for each in sys.modules if each.partition(".")[0] == "sglang"]:
                del sys.modules[known]


def serving(folder: str) -> tuple[Any, Any]:
    """(the server of chats, of Anthropic's messages) of a model, without an engine."""
    anthropic = imported("sglang.srt.entrypoints.anthropic.serving")
    chat = imported("sglang.srt.entrypoints.openai.serving_chat")
    templates = imported("sglang.srt.parser.template_manager")
    tokenizer = imported("transformers").AutoTokenizer.from_pretrained(folder)
    settings = types.SimpleNamespace(
        default_chat_template_kwargs=None, tokenizer_metrics_allowed_custom_labels=None, context_length=32768
    )
    for module in (chat, imported("sglang.srt.entrypoints.openai.serving_base")):
        for name in ("get_serving", "get_model"):
            if hasattr(module, name):
                setattr(module, name, lambda: settings)
    config = types.SimpleNamespace(
        hf_config=types.SimpleNamespace(model_type="qwen3", architectures=["Qwen3ForCausalLM"]),
        get_default_sampling_params=dict,
        is_multimodal=False,
        context_len=32768,
    )
    manager = types.SimpleNamespace(
        tokenizer=tokenizer,
        processor=None,
        model_path=folder,
        model_config=config,
        server_args=settings,
        config_value=lambda _name: None,
    )
    found = templates.TemplateManager()
    found.load_chat_template(manager, None, folder)
    chats = chat.OpenAIServingChat(manager, found)
    return chats, anthropic.AnthropicServing(chats)


def tokens_of(chats: Any, messages: Any, endpoint: str, body: dict[str, Any]) -> list[int] | None:
    """The prompt's tokens; None if SGLang refuses the body."""
    protocol = imported("sglang.srt.entrypoints.openai.protocol")
    try:
        if endpoint == "/v1/messages":
            given = imported("sglang.srt.entrypoints.anthropic.protocol").AnthropicMessagesRequest(model="tiny", **body)
            request = messages._convert_to_chat_completion_request(given)
        else:
            request = protocol.ChatCompletionRequest(model="tiny", **body)
        if chats._validate_request(request):
            return None
        found = chats._process_messages(request, False).prompt_ids
    except Exception:  # each becomes a 400 or a 500
        return None
    return [int(token) for token in found]


class _Allocator:
    """Frees nothing: there is no KV."""

    device = "cpu"

    def free(self, _indices: object) -> None:
        pass

    def free_segment(self, _indices: object, **_named: object) -> None:
        pass


PROMPTS = (
    list(range(100, 228)),
    [*range(100, 164), *range(500, 540)],
    list(range(100, 196)),
    list(range(900, 925)),
    [*range(100, 164), *range(500, 532), *range(700, 770)],
)
STEPS: tuple[tuple[str, int], ...] = (
    *(("insert", number) for number in range(len(PROMPTS))),
    *(("evict", tokens) for tokens in (16, 80, 4096)),
    *(("insert", number) for number in (1, 0)),
    ("flush", 0),
)


def life() -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """(what is done, and how many tokens of each prompt are cached then; the events of it)."""
    radix, torch = imported("sglang.srt.mem_cache.radix_cache"), imported("torch")
    base = imported("sglang.srt.mem_cache.base_prefix_cache")
    cache = radix.RadixCache.create_simulated(
        page_size=PAGE_TOKENS, enable_kv_cache_events=True, mock_allocator=_Allocator()
    )

    def key(tokens: list[int]) -> Any:
        return radix.RadixKey(token_ids=array("q", tokens), extra_key=None)

    for what, number in STEPS:
        if what == "insert":
            tokens = PROMPTS[number]
            cache.insert(base.InsertParams(key=key(tokens), value=torch.arange(len(tokens))))
        elif what == "evict":
            cache.evict(base.EvictParams(num_tokens=number))
        else:
            cache.reset()
        found = [cache.match_prefix(base.MatchPrefixParams(key=key(tokens))).device_prefix_len for tokens in PROMPTS]
        yield {"step": what, "number": number, "prompts": PROMPTS, "cached": found}, cache.take_events()


def published() -> Iterator[dict[str, Any]]:
    """Each step of `life` with the frames that SGLang's publisher sends."""
    import zmq

    events = imported("sglang.srt.disaggregation.kv_events")
    subscriber: Any = zmq.Context.instance().socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    subscriber.setsockopt(zmq.RCVTIMEO, 10_000)
    port = subscriber.bind_to_random_port("tcp://127.0.0.1")
    publisher = events.ZmqEventPublisher(0, endpoint=f"tcp://127.0.0.1:{port}", topic="kv", bind=False)
    for number, (step, batch) in enumerate(life()):
        publisher.publish(events.KVEventBatch(ts=float(number), events=batch))
        yield {**step, "frames": [b64encode(frame).decode() for frame in subscriber.recv_multipart()]}
    publisher.shutdown()


def main(what: str, folder: str = "") -> None:
    """See the module."""
    sys.meta_path.append(_STUBS)
    if what == "events":
        for line in published():
            print(json.dumps(line), flush=True)
        return
    chats, messages = serving(folder)
    print(json.dumps({"stubs": sorted(_STUBS.missing)}), flush=True)
    for text in sys.stdin:
        asked = json.loads(text)
        print(json.dumps(tokens_of(chats, messages, asked["endpoint"], asked["body"])), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
