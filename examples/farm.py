"""A small internet on this machine: 64 sites of real pages, for a crawler to crawl.

    python examples/farm.py     # serves until Ctrl-C, having printed the start pages

The pages (sites.py) are the standard library's documentation as pydoc renders it, rendered once at the start and kept
in memory. Every address 127.0.0.1 to 127.0.0.64 is a site of its own, with its own selection of the pages in several
releases, links within the site, to its neighbours and out into the world, and what crawlers meet out there: robots.txt,
slow pages, errors that stay and errors that pass, redirects, broken links, connections that are reset, and one page of
several megabytes.

`Farm` starts it in a process of its own, which ends when told to, and by itself when its parent has gone. It counts how
many requests each site has at once, so that a crawler's politeness can be judged from the other side.
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
from dataclasses import astuple, dataclass, field
from typing import Any

from aiohttp import web

from sites import HOSTS, MODULES, RELEASES, Answer, Site, build_sites, crawlable, render_pages

LATENCY = 0.005  # seconds each answer takes at least, as if the sites were some way off
SLOW = 1.0  # seconds a slow page takes
NOT_HERE = Answer(404, body=b"not here")


@dataclass(frozen=True, slots=True)
class Usage:
    """What the farm has served, the CPU seconds it took for that, and the most requests that one site had at once."""

    cpu: float
    requests: int
    most_at_once: int


@dataclass(slots=True)
class Visits:
    """The requests to one site: under way now, the most there were at once, and how many came for each path."""

    now: int = 0
    most_at_once: int = 0
    paths: Counter[str] = field(default_factory=Counter)
    under_way: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def one(self, path: str) -> Iterator[None]:
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
    """Answers from memory, and counts. A request counts until its answer is ready or its client has gone."""

    def __init__(self, sites: dict[str, Site], latency: float) -> None:
        self._sites = sites
        self._latency = latency
        self.forget()

    def forget(self) -> None:
        """Counts from nothing again; what fails the first times does so again."""
        self._cpu_before = time.process_time()
        self._visits = {host: Visits() for host in self._sites}
        self._failed: Counter[tuple[str, str]] = Counter()

    def usage(self) -> Usage:
        requests = sum(visits.paths.total() for visits in self._visits.values())
        most = max(visits.most_at_once for visits in self._visits.values())
        return Usage(time.process_time() - self._cpu_before, requests, most)

    def tell(self, what: str) -> Any:
        """The answer to a word of the parent's."""
        match what:
            case "usage":
                return astuple(self.usage())
            case "visits":
                return {host: (one.now, one.most_at_once, one.paths, +one.under_way) for host, one in self._visits.items()}
            case "pages":
                paths = ((host, crawlable(site)) for host, site in self._sites.items())
                return {f"http://{host}{path}": status for host, found in paths for path, status in found.items()}
            case "forget":
                return self.forget()
        raise ValueError(f"the farm was asked for {what!r}, which it does not know")

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        # The end of a connection takes some turns of the loop to reach its handler, a new request takes fewer: with these
        # turns, who has gone before this request was sent no longer counts when it does.
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
                return respond(Answer(answer.first, body=b"not now"))
            return respond(answer)


def respond(answer: Answer) -> web.Response:
    headers = {"Content-Type": "text/html; charset=utf-8"}
    if answer.location:
        headers["Location"] = answer.location
    return web.Response(status=answer.status, body=answer.body, headers=headers)


def reset(transport: asyncio.Transport | None) -> None:
    """Ends the connection as a crashed machine would: the client reads "connection reset by peer"."""
    if transport is not None:
        no_linger = struct.pack("ii", 1, 0)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
        transport.abort()


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed, as percore's workers have it, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def bind_all(hosts: tuple[str, ...], tries: int = 20) -> list[socket.socket]:
    """One free port, the same on all addresses. Another program may hold it on one of them: then another port."""
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
    # A client that goes away ends its handler, so that nothing counts that nobody waits for.
    protocols = web.Server(server.answer, access_log=None, handler_cancellation=True)
    listening = [await asyncio.get_running_loop().create_server(protocols, sock=sock) for sock in sockets]
    try:
        yield
    finally:
        for each in listening:
            each.close()
        await protocols.shutdown(timeout=0.1)


async def serve(options: argparse.Namespace) -> None:
    """Serves until SIGINT or SIGTERM; as a child also until standard input ends, answering each line there."""
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
    """A line from the parent asks for something; the end of its pipe says that it has gone, however it went."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    try:
        while line := await reader.readline():
            print(json.dumps(server.tell(line.decode().strip())), flush=True)
    finally:
        ended.set()


class Farm:
    """The farm in a process of its own: `with Farm() as farm: crawl(farm.starts)`.

    Making one returns when all pages are served (RuntimeError when that fails); leaving the block ends the process.
    It is in a process group of its own, so that Ctrl-C on a terminal ends the crawl and not what is being crawled.
    Its questions are answered within milliseconds, or RuntimeError if it has died.
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
        """What the farm has served until now, and what it took."""
        return Usage(*self._ask("usage"))

    def visits(self) -> dict[str, Visits]:
        """What each site, by its "address:port", has seen of the crawler."""
        told = self._ask("visits")
        return {host: Visits(now, most, Counter(paths), Counter(held)) for host, (now, most, paths, held) in told.items()}

    def pages(self) -> dict[str, int]:
        """Every URL that a crawler comes to which obeys robots.txt, and the status it gets in the end; 0: a reset."""
        pages: dict[str, int] = self._ask("pages")
        return pages

    def forget(self) -> None:
        """Begins to count anew; what fails the first times does so again."""
        self._ask("forget")

    def close(self) -> int:
        """Ends the farm; its exit code."""
        # SIGTERM too: while the pages are being rendered nobody reads the pipe yet.
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
