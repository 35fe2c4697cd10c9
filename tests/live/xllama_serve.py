"""Runs llama.cpp's server from the `xllamacpp` wheel, without a build.

With metrics and two slots. Runs in the wheel's environment: `xllama_serve.py MODEL.gguf PORT`.
"""

from __future__ import annotations

import signal
import sys

import xllamacpp

SLOTS = 2
SLOT_TOKENS = 4096


def serve(gguf: str, port: int) -> None:
    """Serve one model on loopback under the name `tiny`. The server's threads live as long as the object."""
    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.model_alias = {"tiny"}
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_parallel = SLOTS
    params.n_ctx = SLOTS * SLOT_TOKENS
    params.kv_unified = False
    params.endpoint_metrics = True
    params.use_jinja = True
    server = xllamacpp.Server(params)
    print(f"serving on {server.listening_address}", flush=True)
    signal.pause()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
