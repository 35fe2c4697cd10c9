"""Runs the server of SGLang in Rust without an engine, for its tokens of chats.

Runs in the environment of SGLang alone: `sglang_rust.py MODEL_FOLDER PORT`. It reads a body of `/v1/chat/completions`
from each line, and writes the tokens that the server hands to its engine, or null where it refuses the body. Other
lines are its log.
"""

from __future__ import annotations

import http.client
import importlib.machinery
import importlib.util
import json
import os
import sys
import sysconfig
import threading
from pathlib import Path
from typing import Any

import msgspec

_LIBRARY = Path(sysconfig.get_paths()["purelib"]) / "sglang/srt/rust_extensions"
ENOUGH = "its tokens are known"
_OF_CACHES = {
    "hicache_storage_backend": None,
    "hicache_storage_backend_extra_config": None,
    "hicache_storage_prefetch_policy": "best_effort",
    "hicache_write_policy": "write_through",
    "load_snapshot_path": None,
    "load_snapshot_dp_size": 0,
    "load_snapshot_dp_rank": 0,
}


def library() -> Any:
    """The extension, without the package around it, which needs kernels."""
    (path,) = _LIBRARY.glob("_server*.so")
    loader = importlib.machinery.ExtensionFileLoader("_server", str(path))
    spec = importlib.util.spec_from_loader("_server", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def started(folder: str, port: int) -> Any:
    """The server, with the defaults of a launch."""
    rust = library()
    sizes = json.loads(Path(folder, "config.json").read_text())
    model = rust.ModelConfig(
        context_len=32768,
        vocab_size=sizes["vocab_size"],
        is_multimodal=False,
        default_sampling_params=rust.DefaultSamplingParams(),
        model_type=sizes["model_type"],
    )
    named = {"model_path": folder, "tokenizer_path": folder, "served_model_name": "tiny", "host": "127.0.0.1"}
    texts = {"load_format": "auto", "weight_version": "default", "log_level": "error", "log_level_http": "error"}
    known = {"version": "0.5.23", "deployment_info": "{}", "launch_server_info": "{}", "accelerator": "cpu"}
    absent = ("revision", "grpc_port", "chat_template", "reasoning_parser", "default_priority_value", "metrics")
    off = (
        *("stream_response_default_include_usage", "skip_tokenizer_init", "enable_request_header_overrides"),
        *(
            "incremental_streaming_output",
            "enable_strict_thinking",
            "allow_auto_truncate",
            "enable_return_hidden_states",
        ),
    )
    return rust.Server(
        rust.ServerArgs(
            **named,
            **texts,
            **known,
            **_OF_CACHES,
            **dict.fromkeys(absent),
            **dict.fromkeys(off, False),
            port=port,
            tool_call_parser="qwen25",
            default_chat_template_kwargs="{}",
            preferred_sampling_params=None,
            tokenizer_worker_num=1,
            detokenizer_worker_num=1,
            skip_server_warmup=True,
            health_generate_headers={},
            disaggregation_mode=rust.DisaggregationMode.Null,
            model_config=model,
            default_max_new_tokens=1,
            lora_ids={},
            limit_mm_data_per_request=[],
            num_reserved_tokens=0,
            tokenizer_model_max_length=32768,
            max_total_num_tokens=100_000,
            num_accelerators=1,
        )
    )


def main(folder: str, port: int) -> None:
    server, tokens = started(folder, port), list[Any]()

    def take() -> None:
        """Play the engine: note the prompt, and end the request."""
        while True:
            server.wait_request(50)
            for request in server.recv_requests(16):
                header, buffers = msgspec.msgpack.decode(request.header), dict(request.buffers)
                if "input_ids" in buffers:
                    tokens.append(buffers["input_ids"].tolist())
                server.push_error(header[1], ENOUGH)

    threading.Thread(target=take, daemon=True).start()
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    for line in sys.stdin:
        tokens.clear()
        client.request("POST", "/v1/chat/completions", line.strip().encode(), {"content-type": "application/json"})
        client.getresponse().read()
        print(json.dumps(tokens[0] if tokens else None), flush=True)
    os._exit(0)  # its threads would go on


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
