"""A small internet on this machine: 64 sites of real pages, for a crawler to crawl.

    python examples/farm.py     # serves until Ctrl-C, having printed the start pages

The pages are the standard library's documentation as pydoc renders it, rendered once at the start and kept in memory.
Every address 127.0.0.1 to 127.0.0.64 is a site of its own, with its own selection of the pages in several releases,
links within the site, to its neighbours and out into the world, and what crawlers meet out there: slow pages, errors,
redirects, broken links, connections that are reset, and one page of several megabytes.

`Farm` starts it in a process of its own, which ends when told to, and by itself when its parent has gone.
"""

import argparse
import asyncio
import errno
import importlib
import json
import os
import pydoc
import re
import signal
import socket
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

HOSTS = tuple(f"127.0.0.{number}" for number in range(1, 65))

# Enough pages for a crawl of some seconds: the same text in several releases, as documentation sites keep them.
RELEASES = ("3.12", "3.13", "3.14", "3.15")

# Modules that every Python since 3.11 has and that are quick to render. Not os and sys: pydoc shows the values of a
# module's variables, and nobody's environment or paths belong on a web page.
MODULES = """
    abc argparse base64 bdb bisect calendar cmd code codecs collections configparser contextlib contextvars copy csv
    dataclasses datetime difflib enum fileinput fractions ftplib functools getopt graphlib gzip hashlib heapq hmac
    html.parser http.client io ipaddress itertools json logging mimetypes mmap netrc operator optparse pathlib pdb
    pickle pkgutil plistlib poplib pprint queue random re sched secrets selectors shelve shlex shutil smtplib socket
    statistics string struct subprocess tarfile tempfile textwrap threading timeit tokenize tomllib traceback types
    typing unittest.case urllib.parse uuid warnings wave zlib
""".split()  # noqa: SIM905 - easier to read than seventy strings

SLOW_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a site says at one path."""

    status: int = 200
    body: bytes = b""
    location: str | None = None
    delay: float = 0.0
    reset: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """What the farm has served, and the CPU seconds it took for that, since its pages were ready."""

    cpu: float
    requests: int

    def since(self, earlier: "Usage") -> "Usage":
        return Usage(self.cpu - earlier.cpu, self.requests - earlier.requests)


def render_pages() -> dict[str, bytes]:
    """The documentation of every module in MODULES, as HTML."""
    renderer = pydoc.HTMLDoc()
    pages = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pydoc touches every attribute, the deprecated ones too
        for name in MODULES:
            module = importlib.import_module(name)
            pages[name] = relink(renderer.page(name, renderer.document(module))).encode()
    return pages


def relink(html: str) -> str:
    """Links to modules the farm does not have lead to the world outside, and links to files of this machine go."""

    def target(link: re.Match[str]) -> str:
        return link[0] if link[1] in MODULES else f'href="https://docs.python.org/3/library/{link[1]}.html"'

    html = re.sub(r'<a href="file:[^"]*">[^<]*</a>', "", html)
    return re.sub(r'href="([\w.]+)\.html(?:#[^"]*)?"', target, html)


def index_page(title: str, links: list[str]) -> bytes:
    items = "\n".join(f'<li><a href="{link}">{link}</a></li>' for link in links)
    return f"<!DOCTYPE html><html><head><title>{title}</title></head><body><ul>\n{items}\n</ul></body></html>".encode()


def build_site(number: int, port: int, pages: dict[str, bytes]) -> dict[str, Answer]:
    """Every path of one site. The page of a module that this site does not keep is a redirect to a neighbour's."""
    roots = [f"http://{HOSTS[(number + step) % len(HOSTS)]}:{port}/" for step in (1, 9)]
    kept = [name for place, name in enumerate(pages) if (number + place) % 16]
    site = odd_pages(number, pages)
    for release in RELEASES:
        site[f"/{release}/"] = Answer(body=index_page(f"Python {release}", [f"{name}.html" for name in kept]))
        for name, body in pages.items():
            path = f"/{release}/{name}.html"
            site[path] = Answer(body=body) if name in kept else Answer(302, location=roots[0] + path[1:])
    links = [*(path for path in site if path.count("/") == 1), "/missing.html"]
    links += [*(f"/{release}/" for release in RELEASES), *roots]
    site["/"] = Answer(body=index_page(f"Site {number + 1}", links))
    return site


def odd_pages(number: int, pages: dict[str, bytes]) -> dict[str, Answer]:
    """The pages at the top of a site that are there to give trouble."""
    odd = {
        "/error.html": Answer(500, body=index_page("Something went wrong", [])),
        "/moved.html": Answer(301, location=f"/{RELEASES[-1]}/"),
    }
    if number % 4 == 0:
        odd["/slow.html"] = Answer(body=index_page("At last", []), delay=SLOW_SECONDS)
    if number % 8 == 0:
        odd["/reset.html"] = Answer(reset=True)
    if number == 0:
        odd["/everything.html"] = Answer(body=b"\n".join(pages.values()))
    return odd


class Server:
    """Answers from memory, and counts."""

    def __init__(self, port: int, pages: dict[str, bytes]) -> None:
        self._sites = {f"{host}:{port}": build_site(number, port, pages) for number, host in enumerate(HOSTS)}
        self._cpu_before = time.process_time()
        self._requests = 0

    def usage(self) -> Usage:
        return Usage(time.process_time() - self._cpu_before, self._requests)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self._requests += 1
        answer = self._sites.get(request.host, {}).get(request.path)
        if answer is None:
            return respond(Answer(404, body=b"not here"))
        if answer.delay:
            await asyncio.sleep(answer.delay)
        if answer.reset:
            reset(request.transport)
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


def bind_all(tries: int = 20) -> list[socket.socket]:
    """One free port, the same on all addresses. Another program may hold it on one of them: then another port."""
    sockets: list[socket.socket] = []
    try:
        for host in HOSTS:
            port = sockets[0].getsockname()[1] if sockets else 0
            sockets.append(socket.create_server((host, port), backlog=512))
    except OSError as error:
        for bound in sockets:
            bound.close()
        if error.errno == errno.EADDRINUSE and tries > 1:
            return bind_all(tries - 1)
        raise
    return sockets


@asynccontextmanager
async def serving(sockets: list[socket.socket], server: Server) -> AsyncIterator[None]:
    protocols = web.Server(server.answer, access_log=None)
    listening = [await asyncio.get_running_loop().create_server(protocols, sock=sock) for sock in sockets]
    try:
        yield
    finally:
        for each in listening:
            each.close()
        await protocols.shutdown(timeout=0.1)


async def serve(child: bool) -> None:
    """Serves until SIGINT or SIGTERM; as a child also until standard input ends, answering each line there."""
    sockets = bind_all()
    port: int = sockets[0].getsockname()[1]
    server = Server(port, render_pages())
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, ended.set)
    async with serving(sockets, server):
        print(json.dumps([f"http://{host}:{port}/" for host in HOSTS]), flush=True)
        parent = asyncio.create_task(answer_parent(server, ended)) if child else None
        await ended.wait()
        if parent is not None:
            parent.cancel()
    if not child:
        usage = server.usage()
        print(f"{usage.requests} requests, {usage.cpu:.2f} s of CPU")


async def answer_parent(server: Server, ended: asyncio.Event) -> None:
    """A line from the parent asks for the usage; the end of its pipe says that it has gone, however it went."""
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    try:
        while await reader.readline():
            usage = server.usage()
            print(json.dumps([usage.cpu, usage.requests]), flush=True)
    finally:
        ended.set()


class Farm:
    """The farm in a process of its own: `with Farm() as farm: crawl(farm.starts)`.

    Making one returns when all pages are served (RuntimeError when that fails); leaving the block ends the process.
    It is in a process group of its own, so that Ctrl-C on a terminal ends the crawl and not what is being crawled.
    """

    def __init__(self) -> None:
        command = [sys.executable, os.path.abspath(__file__), "--child"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, process_group=0)
        try:
            self.starts: list[str] = json.loads(self._line())
        except BaseException:
            self.close()
            raise

    def usage(self) -> Usage:
        """What the farm has used until now. It answers within milliseconds; RuntimeError if it has died."""
        assert self._process.stdin is not None
        self._process.stdin.write("usage\n")
        self._process.stdin.flush()
        return Usage(*json.loads(self._line()))

    def close(self) -> None:
        # SIGTERM too: while the pages are being rendered nobody reads the pipe yet.
        self._process.terminate()
        self._process.communicate()

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
    parser = argparse.ArgumentParser(description="Serves 64 small sites of real pages on 127.0.0.1 to 127.0.0.64.")
    parser.add_argument("--child", action="store_true", help="end with the pipe on standard input, report on request")
    options = parser.parse_args()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(serve(options.child))


if __name__ == "__main__":
    main()
