"""A web service that uses every CPU: aiohttp.web with one percore.Runner for the life of the app.

    python examples/service.py                                        # until Ctrl-C or SIGTERM
    curl --data-binary @README.md http://127.0.0.1:8080/summary       # CPU work, in a worker's thread
    curl --data-binary @urls.txt http://127.0.0.1:8080/fetch          # fetches, in all workers; one answer
    curl -N --data-binary @urls.txt http://127.0.0.1:8080/stream      # the same, each page as soon as it has arrived
    curl http://127.0.0.1:8080/usage                                  # CPU and memory of each process
    curl http://127.0.0.1:8080/statistics                             # state and figures of each worker

When a client disconnects, its calls in the workers are cancelled. When a worker dies, the requests whose calls it had begun fail
with 502 and the reason; other requests are not affected. SIGTERM drains the service: it answers the accepted requests, the workers
leave their lifespans, and the process ends with exit code 0. A second SIGTERM ends it at once, with exit code 1.

The service fetches any address that a client sends, so by default it listens only on 127.0.0.1.
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
    """One session per worker. Its connections serve all requests whose fetches run in that worker."""
    connector = aiohttp.TCPConnector(limit=0)  # the runner's `concurrency` is the limit
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session
    LOG.info("worker %d has closed its session", percore.current_worker().index)


async def fetch(url: str) -> dict[str, Any]:
    """Fetch one page. A failure is returned, not raised, so that the other pages of the request are not lost."""
    worker = percore.current_worker().pid
    try:
        async with percore.state(aiohttp.ClientSession).get(url) as response:
            return {"url": url, "worker": worker, "status": response.status, "size": len(await response.read())}
    except (aiohttp.ClientError, TimeoutError) as error:
        return {"url": url, "worker": worker, "error": str(error) or type(error).__name__}


def summarize(text: str, most: int = 3) -> dict[str, Any]:
    """Pick the sentences with the most of the text's frequent words. In the service's own loop this would block all requests."""
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
    # submit, not run: with --max-pending calls pending, submit raises RunnerFull at once, while run would wait.
    return web.json_response(await request.app[RUNNER].submit(summarize, await request.text()))


async def get_pages(request: web.Request) -> web.Response:
    return web.json_response(await request.app[RUNNER].map(fetch, await read_urls(request)))


async def stream_pages(request: web.Request) -> web.StreamResponse:
    """Send a line of JSON for each page as it arrives. A slow client slows the fetches: the map's window bounds them."""
    urls = await read_urls(request)
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    # The status has been sent, so from here on an error can only be reported in a line of the response.
    async with request.app[RUNNER].map_items(fetch, urls, ordered=False, return_exceptions=True) as pages:
        with suppress(ConnectionResetError):  # the client disconnected in the middle of a line
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
    """Turn percore's errors into HTTP responses. A timeout needs no code here: aiohttp answers a TimeoutError with 504."""
    try:
        return await handler(request)
    except (percore.WorkerDied, percore.RunnerFull, percore.RunnerBroken) as error:
        if request.writer.output_size:  # a stream whose status has been sent can only be broken off
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
        # Every request has been answered or cut off by now. No request waits for the calls that still run (a plain function whose
        # client has disconnected, the `finally` of a cancelled coroutine): give them a few seconds.
        await runner.aclose(grace=CLEAN_UP_SECONDS)


async def tell_draining(app: web.Application) -> None:
    running = app[RUNNER].statistics().running
    LOG.info("draining: takes no more requests, %d calls are running", running)


def main() -> None:
    options = read_command_line()
    try:
        sock = bind(options.host, options.port)
    except OSError as error:  # the port is in use or privileged; the host is unknown or another machine
        sys.exit(f"cannot listen on {options.host}, port {options.port}: {error.strerror}")
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    # On SIGTERM and Ctrl-C, aiohttp stops listening, gives the handlers shutdown_timeout seconds to answer, cuts off the others,
    # and leaves the cleanup contexts last. Then run_app returns, and the exit code is 0.
    web.run_app(
        make_app(options),
        sock=sock,
        shutdown_timeout=options.drain,
        handler_cancellation=True,  # when a client disconnects, cancel its handler, and thereby the calls that it awaits
        access_log=None,
        print=partial(print, flush=True),  # prints the address at once, also into a pipe
        loop=LOOPS[options.loop](),
    )


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket, so that its port is known (0: any free port). It starts to listen only when the workers are ready."""
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
    if not 0 <= number <= 65535:  # getaddrinfo would take the number modulo 65536
        raise ValueError
    return number


def whole(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


if __name__ == "__main__":
    main()
