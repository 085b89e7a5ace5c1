"""A web service that uses every CPU: aiohttp.web with one percore.Runner for the life of the app.

    python examples/service.py                                        # until Ctrl-C or SIGTERM
    curl --data-binary @README.md http://127.0.0.1:8080/summary       # CPU work, in a worker's thread
    curl --data-binary @urls.txt http://127.0.0.1:8080/fetch          # fetches, in all workers; one answer
    curl -N --data-binary @urls.txt http://127.0.0.1:8080/stream      # the same, each as soon as it is there
    curl http://127.0.0.1:8080/usage                                  # what each process takes
    curl http://127.0.0.1:8080/statistics                             # what each worker does

A client that goes away cancels its calls in the workers. A worker that dies costs the requests whose calls it had begun: they get
502 and the reason; the others notice nothing. SIGTERM drains: accepted requests are answered, then the workers leave their
lifespans, then the process ends with exit code 0. A second SIGTERM ends it at once, with exit code 1.

It fetches whatever address it is given, so it listens to this machine alone unless told otherwise.
"""

import argparse
import asyncio
import dataclasses
import json
import logging
import re
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Any

import aiohttp
import uvloop
from aiohttp import web
from aiohttp.typedefs import Handler

import percore

LOG = logging.getLogger("service")
RUNNER = web.AppKey("RUNNER", percore.Runner)
CLEAN_UP_SECONDS = 5.0
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


# ---- what runs in the workers ----


@asynccontextmanager
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """One session per worker: its connections serve all the requests whose fetches run there."""
    connector = aiohttp.TCPConnector(limit=0)  # the runner's `concurrency` is the limit
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session
    LOG.info("worker %d has closed its session", percore.current_worker().index)


async def fetch(url: str) -> dict[str, Any]:
    """A page that cannot be had is an answer too: it must not cost the other pages of its request."""
    worker = percore.current_worker().pid
    try:
        async with percore.state(aiohttp.ClientSession).get(url) as response:
            return {"url": url, "worker": worker, "status": response.status, "size": len(await response.read())}
    except (aiohttp.ClientError, TimeoutError) as error:
        return {"url": url, "worker": worker, "error": str(error) or type(error).__name__}


def summarize(text: str, most: int = 3) -> dict[str, Any]:
    """The sentences with the most of the text's frequent words. In the service's own loop it would hold everybody up."""
    sentences = re.split(r"(?<=[.!?])\s+", text.strip())
    words = [re.findall(r"\w+", sentence.lower()) for sentence in sentences]
    counts = Counter(word for line in words for word in line)

    def weight(number: int) -> float:
        return sum(counts[word] for word in words[number] if len(word) > 3) / (len(words[number]) + 10)

    best = sorted(sorted(range(len(sentences)), key=weight, reverse=True)[:most])
    told = [sentences[number] for number in best]
    return {"sentences": told, "words": counts.total(), "worker": percore.current_worker().pid}


# ---- what answers requests ----


async def get_summary(request: web.Request) -> web.Response:
    # submit and not run: where --max-pending calls are under way it raises RunnerFull at once, run would wait.
    return web.json_response(await request.app[RUNNER].submit(summarize, await request.text()))


async def get_pages(request: web.Request) -> web.Response:
    return web.json_response(await request.app[RUNNER].map(fetch, await read_urls(request)))


async def stream_pages(request: web.Request) -> web.StreamResponse:
    """A line of JSON for each page as it comes. A client that reads slowly slows the fetches down: the map's window bounds them."""
    urls = await read_urls(request)
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    # The status is sent: from here on an error can only be told in its own line.
    async with request.app[RUNNER].map_items(fetch, urls, ordered=False, return_exceptions=True) as pages:
        with suppress(ConnectionResetError):  # the client has gone in the middle of a line
            async for url, page in pages:
                line = {"url": url, "error": str(page)} if isinstance(page, BaseException) else page
                await response.write(json.dumps(line).encode() + b"\n")
    return response


async def get_usage(request: web.Request) -> web.Response:
    return web.Response(text=f"{await request.app[RUNNER].usage()}\n")


async def get_statistics(request: web.Request) -> web.Response:
    return web.json_response(dataclasses.asdict(request.app[RUNNER].statistics()))


async def read_urls(request: web.Request) -> list[str]:
    urls = (await request.text()).split()
    if not urls:
        raise web.HTTPBadRequest(text="send the addresses to fetch, one a line\n")
    return urls


@web.middleware
async def tell_failures(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What becomes of the workers, in words of HTTP. A timeout needs none: aiohttp makes a TimeoutError a 504."""
    try:
        return await handler(request)
    except (percore.WorkerDied, percore.RunnerFull, percore.RunnerBroken) as error:
        if request.writer.output_size:  # a stream whose status is sent: all that is left is to break it off
            raise
        status = web.HTTPBadGateway if isinstance(error, percore.WorkerDied) else web.HTTPServiceUnavailable
        return web.json_response({"error": type(error).__name__, "reason": str(error)}, status=status.status_code)


# ---- the app and its life ----


def make_app(options: argparse.Namespace) -> web.Application:
    app = web.Application(middlewares=[tell_failures])
    app.cleanup_ctx.append(partial(keep_runner, options))
    app.on_shutdown.append(tell_draining)
    app.add_routes(
        [
            web.post("/summary", get_summary),
            web.post("/fetch", get_pages),
            web.post("/stream", stream_pages),
            web.get("/usage", get_usage),
            web.get("/statistics", get_statistics),
        ]
    )
    return app


async def keep_runner(options: argparse.Namespace, app: web.Application) -> AsyncIterator[None]:
    async with percore.Runner(options.workers, lifespan=http, max_pending=options.max_pending) as runner:
        app[RUNNER] = runner
        yield
        # Every request has been answered or cut off by now. What still runs has nobody who waits for it (a plain function that
        # a client has left, the `finally` of a cancelled coroutine): it gets some seconds, not for ever.
        await runner.aclose(grace=CLEAN_UP_SECONDS)


async def tell_draining(app: web.Application) -> None:
    running = app[RUNNER].statistics().running
    LOG.info("draining: takes no more requests, %d calls are running", running)


def main() -> None:
    options = read_command_line()
    try:
        sock = bind(options.host, options.port)
    except OSError as error:  # the port is in use, or not for everybody; the host is unknown, or another machine
        sys.exit(f"cannot listen on {options.host}, port {options.port}: {error.strerror}")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    # SIGTERM and Ctrl-C: aiohttp stops listening, gives the handlers shutdown_timeout seconds to answer, cuts off what has not,
    # and leaves the cleanup contexts last. Then run_app returns, and the exit code is 0.
    web.run_app(
        make_app(options),
        sock=sock,
        shutdown_timeout=options.drain,
        handler_cancellation=True,  # a client that disconnects cancels its handler, and with that the calls it awaits
        access_log=None,
        print=partial(print, flush=True),  # says where it listens, also to a pipe
        loop=LOOPS[options.loop](),
    )


def bind(host: str, port: int) -> socket.socket:
    """A socket with its port chosen (0: a free one), so that it can be told. It listens when the workers are ready, not before."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with ExitStack() as undo:
        sock = undo.enter_context(socket.socket(family, kind, protocol))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        undo.pop_all()
    return sock


def read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A web service with its work on every CPU.")
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="where to listen (default 127.0.0.1)")
    add("--port", type=port, default=8080, help="0: any free one, which is printed (default 8080)")
    add("--workers", type=whole, metavar="N", help="processes (default: one for each CPU)")
    add("--max-pending", type=whole, default=10_000, metavar="N", help="calls at once; summaries above it get 503 (default 10000)")
    add("--drain", type=float, default=10.0, metavar="S", help="seconds requests have to end after SIGTERM (default 10)")
    add("--loop", choices=LOOPS, default="uvloop", help="the service's own event loop (default uvloop)")
    return parser.parse_args()


def port(text: str) -> int:
    number = int(text)
    if not 0 <= number <= 65535:  # getaddrinfo would take the rest of a division
        raise ValueError
    return number


def whole(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


if __name__ == "__main__":
    main()
