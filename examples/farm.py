"""A test server with 64 sites of real pages on this machine, for a crawler to crawl.

    python examples/farm.py     # prints the start pages, then serves until Ctrl-C

The pages (sites.py) are the standard library's documentation. pydoc renders them once at the start, and they are kept in
memory. Every address from 127.0.0.1 to 127.0.0.64 is a separate site with its own selection of the pages, in several
releases. A site has links within itself, to its neighbours and to the internet, and the usual trouble for crawlers:
robots.txt, slow pages, permanent and temporary errors, redirects, broken links, connections that are reset, and one page
of several megabytes.

`Farm` starts the server in a separate process, which ends when `close` is called or when its parent has ended. It counts
how many requests each site has at once, so that the politeness of a crawler can be checked from the server's side.
"""

import argparse
import asyncio
import errno
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import astuple, dataclass, field, fields, replace
from email.utils import formatdate
from typing import Any

from aiohttp import web

from sites import HOSTS, MODULES, RELEASES, Answer, Site, build_sites, crawlable, render_pages

LATENCY = 0.005  # the least seconds that each answer takes, to simulate the network
SLOW = 1.0  # the seconds that a slow page takes
NOT_HERE = Answer(404, body=b"not here")


@dataclass(frozen=True, slots=True)
class Usage:
    """The number of requests served, the CPU seconds they took, and the most requests that one site had at once."""

    cpu: float
    requests: int
    most_at_once: int


@dataclass(slots=True)
class Visits:
    """The requests to one site: in progress now, the most at once, and how many for each path (all, and in progress).

    `first`, `last`: when the first and the last one came, in seconds of this machine's clock. `early`: how many came although the
    site had asked for a pause.
    """

    now: int = 0
    most_at_once: int = 0
    first: float = 0.0
    last: float = 0.0
    early: int = 0
    rests_until: float = 0.0
    paths: Counter[str] = field(default_factory=Counter)
    under_way: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def one(self, path: str) -> Iterator[None]:
        self.last = time.monotonic()
        self.first = self.first or self.last
        self.early += self.last < self.rests_until
        self.paths[path] += 1
        self.under_way[path] += 1
        self.now += 1
        self.most_at_once = max(self.most_at_once, self.now)
        try:
            yield
        finally:
            self.now -= 1
            self.under_way[path] -= 1


class Server:
    """Answers from memory, and counts requests. A request is in progress until its answer is ready or its client disconnects."""

    def __init__(self, sites: dict[str, Site], latency: float) -> None:
        self._sites = sites
        self._latency = latency
        self.forget()

    def forget(self) -> None:
        """Reset all counts. Pages that fail the first times do so again."""
        self._cpu_before = time.process_time()
        self._visits = {host: Visits() for host in self._sites}
        self._failed: Counter[tuple[str, str]] = Counter()

    def usage(self) -> Usage:
        requests = sum(visits.paths.total() for visits in self._visits.values())
        most = max(visits.most_at_once for visits in self._visits.values())
        return Usage(time.process_time() - self._cpu_before, requests, most)

    def tell(self, what: str) -> Any:
        """Answer a request of the parent process."""
        match what:
            case "usage":
                return astuple(self.usage())
            case "visits":
                names = [each.name for each in fields(Visits)]
                return {host: {name: getattr(one, name) for name in names} for host, one in self._visits.items()}
            case "pages":
                paths = ((host, crawlable(site)) for host, site in self._sites.items())
                return {f"http://{host}{path}": status for host, found in paths for path, status in found.items()}
            case "forget":
                return self.forget()
        raise ValueError(f"the farm was asked for {what!r}, which it does not know")

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        # The end of a connection takes more turns of the loop to reach its handler than a new request does. After these
        # turns, a client that disconnected before this request was sent is no longer counted.
        for _ in range(3):
            await asyncio.sleep(0)
        site = self._sites.get(request.host)
        if site is None:
            return respond(NOT_HERE)
        with self._visits[request.host].one(request.path):
            answer = site.get(request.path, NOT_HERE)
            await asyncio.sleep(self._latency + answer.delay)
            if answer.reset:
                reset(request.transport)
            if self._failed[request.host, request.path] < answer.times:
                self._failed[request.host, request.path] += 1
                if answer.retry_after:  # a date has whole seconds, so it may ask for one less
                    seconds = answer.retry_after - answer.by_date
                    self._visits[request.host].rests_until = time.monotonic() + seconds
                return respond(replace(answer, status=answer.first, body=b"not now", location=None))
            return respond(answer)


def respond(answer: Answer) -> web.Response:
    headers = {"Content-Type": "text/html; charset=utf-8"}
    if answer.location:
        headers["Location"] = answer.location
    if answer.retry_after and answer.status == answer.first:
        ends = formatdate(time.time() + answer.retry_after, usegmt=True)
        headers["Retry-After"] = ends if answer.by_date else str(answer.retry_after)
    return web.Response(status=answer.status, body=answer.body, headers=headers)


def reset(transport: asyncio.Transport | None) -> None:
    """Reset the connection, as a crashed machine would: the client gets "connection reset by peer"."""
    if transport is not None:
        no_linger = struct.pack("ii", 1, 0)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
        transport.abort()


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Create a uvloop loop if uvloop is installed, as percore's workers do, else an asyncio loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def bind_all(hosts: tuple[str, ...], tries: int = 20) -> list[socket.socket]:
    """Bind the same free port on all addresses. If another program uses it on one of them, try another port."""
    sockets: list[socket.socket] = []
    try:
        for host in hosts:
            port = sockets[0].getsockname()[1] if sockets else 0
            sockets.append(socket.create_server((host, port), backlog=512))
    except OSError as error:
        for bound in sockets:
            bound.close()
        if error.errno == errno.EADDRINUSE and tries > 1:
            return bind_all(hosts, tries - 1)
        raise
    return sockets


@asynccontextmanager
async def serving(sockets: list[socket.socket], server: Server) -> AsyncIterator[None]:
    # When a client disconnects, its handler is cancelled, so that its request is no longer counted as in progress.
    protocols = web.Server(server.answer, access_log=None, handler_cancellation=True)
    listening = [await asyncio.get_running_loop().create_server(protocols, sock=sock) for sock in sockets]
    try:
        yield
    finally:
        for each in listening:
            each.close()
        await protocols.shutdown(timeout=0.1)


async def serve(options: argparse.Namespace) -> None:
    """Serve until SIGINT or SIGTERM. As a child process, also answer each line of standard input, and end when that ends."""
    sockets = bind_all(HOSTS[: options.sites])
    port: int = sockets[0].getsockname()[1]
    hosts = [f"{host}:{port}" for host in HOSTS[: options.sites]]
    roots = [f"http://{host}/" for host in hosts]
    pages = render_pages(MODULES[: options.modules])
    sites = build_sites(roots, pages, RELEASES[: options.releases], options.slow)
    server = Server(dict(zip(hosts, sites, strict=True)), options.latency)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, ended.set)
    async with serving(sockets, server):
        print(json.dumps(roots), flush=True)
        parent = asyncio.create_task(answer_parent(server, ended)) if options.child else None
        await ended.wait()
        if parent is not None:
            parent.cancel()
            with suppress(asyncio.CancelledError):
                await parent
    if not options.child:
        usage = server.usage()
        print(f"{usage.requests} requests, {usage.cpu:.2f} s of CPU")


async def answer_parent(server: Server, ended: asyncio.Event) -> None:
    """Answer each line that the parent sends. End the server when the pipe ends, since the parent has then ended."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    try:
        while line := await reader.readline():
            print(json.dumps(server.tell(line.decode().strip())), flush=True)
    finally:
        ended.set()


class Farm:
    """The farm in a separate process: `with Farm() as farm: crawl(farm.starts)`.

    The constructor returns when all pages are being served, or raises RuntimeError. Leaving the block ends the process. The
    process has its own process group, so that Ctrl-C on a terminal ends only the crawl. The other methods return within
    milliseconds, or raise RuntimeError if the process has died.
    """

    def __init__(self, **sizes: float) -> None:
        """`sizes` are the options of the command: sites, modules, releases, latency, slow."""
        command = [sys.executable, os.path.abspath(__file__), "--child", *(f"--{name}={size}" for name, size in sizes.items())]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, process_group=0)
        try:
            self.starts: list[str] = json.loads(self._line())
        except BaseException:
            self.close()
            raise

    def usage(self) -> Usage:
        """Return what the farm has served until now, and the CPU time for it."""
        return Usage(*self._ask("usage"))

    def visits(self) -> dict[str, Visits]:
        """Return the requests to each site, by its "address:port"."""
        told = self._ask("visits")
        counters = ("paths", "under_way")
        return {host: Visits(**one | {name: +Counter(one[name]) for name in counters}) for host, one in told.items()}

    def pages(self) -> dict[str, int]:
        """Return every URL that a crawler which obeys robots.txt finds, with its final status. 0: the connection is reset."""
        pages: dict[str, int] = self._ask("pages")
        return pages

    def forget(self) -> None:
        """Reset all counts. Pages that fail the first times do so again."""
        self._ask("forget")

    def close(self) -> int:
        """End the farm and return its exit code."""
        # Also by SIGTERM, because the process does not read the pipe while it renders the pages.
        self._process.terminate()
        self._process.communicate()
        return self._process.returncode

    def _ask(self, what: str) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return json.loads(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the site farm ended by itself, exit code {self._process.wait()}")
        return line

    def __enter__(self) -> "Farm":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Serves small sites of real pages on 127.0.0.1 to 127.0.0.64.")
    for name, most in (("sites", len(HOSTS)), ("modules", len(MODULES)), ("releases", len(RELEASES))):
        choices = range(1, most + 1)
        parser.add_argument(f"--{name}", type=int, choices=choices, default=most, metavar="N", help=f"1 to {most} (default {most})")
    parser.add_argument("--latency", type=float, default=LATENCY, metavar="S", help="seconds an answer takes at least")
    parser.add_argument("--slow", type=float, default=SLOW, metavar="S", help="seconds a slow page takes")
    parser.add_argument("--child", action="store_true", help="end with the pipe on standard input, answer questions there")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(serve(options))


if __name__ == "__main__":
    main()
