"""The pages in docs/: their Python is Python, names what exists, and does what the page says."""

import ast
import asyncio
import hashlib
import importlib
import inspect
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import percore

pytest.importorskip("aiohttp")

import aiohttp
from aiohttp import web

DOCS = Path(__file__).resolve().parents[2] / "docs"
VERBS = ("map", "map_items", "starmap", "options", "aclose")


def blocks_of(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def parse(block: str) -> ast.AST:
    """A piece of a page may await, as at the prompt of `python -m asyncio`."""
    tree = compile(block, "<page>", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    assert isinstance(tree, ast.AST)
    return tree


PAGES = [page for page in sorted(DOCS.rglob("*.md")) if blocks_of(page)]


def test_most_pages_show_some_python() -> None:
    assert {"crawling.md", "guarantees.md", "logging.md", "service.md"} <= {page.name for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_shows_exists(page: Path) -> None:
    for node in (node for block in blocks_of(page) for node in ast.walk(parse(block))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "percore":
            assert node.attr in percore.__all__
        if isinstance(node, ast.Call) and (signature := signature_of(node.func)):
            given = {keyword.arg for keyword in node.keywords if keyword.arg}
            assert given <= set(signature.parameters), ast.unparse(node)


def signature_of(called: ast.expr) -> inspect.Signature | None:
    """Of the runner's class and of those of its methods that take options, and of an executor's map."""
    if not isinstance(called, ast.Attribute):
        return None
    if ast.unparse(called) == "executor.map":
        return inspect.signature(percore.LoopPoolExecutor.map)
    if ast.unparse(called) == "percore.Runner":
        return inspect.signature(percore.Runner)
    return inspect.signature(getattr(percore.Runner, called.attr)) if called.attr in VERBS else None


# "In an existing service"


class Upstream:
    """What the page's service fetches: /N answers with N bytes, as soon as the gate is open."""

    def __init__(self) -> None:
        self.url = ""
        self.gate = asyncio.Event()
        self.gate.set()
        self._asked: asyncio.Queue[None] = asyncio.Queue()

    async def answer(self, request: web.Request) -> web.Response:
        self._asked.put_nowait(None)
        await self.gate.wait()
        return web.Response(text="x" * int(request.match_info["size"]))

    async def asked(self, count: int) -> None:
        for _ in range(count):
            await self._asked.get()


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=10)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest_asyncio.fixture
async def upstream() -> AsyncIterator[Upstream]:
    upstream = Upstream()
    app = web.Application()
    app.router.add_get("/{size}", upstream.answer)
    async with serving(app) as upstream.url:
        yield upstream


class Client:
    def __init__(self, session: aiohttp.ClientSession, url: str, runner: percore.Runner) -> None:
        self.session = session
        self.url = url
        self.runner = runner

    async def post(self, path: str, data: str) -> tuple[int, Any]:
        async with self.session.post(self.url + path, data=data) as response:
            return response.status, json.loads(await response.text() or "null")

    async def get(self, path: str, **query: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path, params=query) as response:
            return response.status, json.loads(await response.text() or "null")

    def kill_worker(self) -> None:
        """That which has something to do."""
        (busy,) = (worker for worker in self.runner.statistics().workers if worker.running)
        assert busy.pid is not None
        os.kill(busy.pid, signal.SIGKILL)


Serve = Callable[..., AbstractAsyncContextManager[Client]]


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Saves the pieces of the page as the one program that they are, with these changes, and runs its app."""

    @asynccontextmanager
    async def served(*changes: tuple[str, str]) -> AsyncIterator[Client]:
        source = "\n\n".join(blocks_of(DOCS / "how-to" / "service.md"))
        for old, new in changes:
            assert source.count(old) == 1
            source = source.replace(old, new)
        (tmp_path / "page_of_service.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "page_of_service", raising=False)
        page: Any = importlib.import_module("page_of_service")
        app = page.make_app()
        async with serving(app) as url, aiohttp.ClientSession() as session:
            yield Client(session, url, app[page.RUNNER])

    return served


async def test_the_service_page_answers(serve: Serve, upstream: Upstream) -> None:
    urls = [f"{upstream.url}/{size}" for size in (3, 1, 2)]
    digest = hashlib.scrypt(b"text", salt=b"percore", n=2**12, r=8, p=1).hex()
    async with serve() as client:
        assert await client.post("/digest", "text") == (200, digest)
        assert await client.post("/digest-or-refuse", "text") == (200, digest)
        assert await client.post("/order", "text") == (202, None)
        assert await client.post("/sizes", json.dumps(urls)) == (200, [3, 1, 2])
        assert await client.get("/size", url=urls[0]) == (200, 3)
        nobody = "http://127.0.0.1:9/"
        async with client.session.post(f"{client.url}/stream", json=[*urls, nobody]) as response:
            lines = {(line := json.loads(text))["url"]: line async for text in response.content}
        assert "127.0.0.1:9" in lines.pop(nobody)["error"]
        assert {url: line["size"] for url, line in lines.items()} == dict(zip(urls, (3, 1, 2), strict=True))


async def test_the_service_page_tells_of_a_death_and_repeats_what_it_may(serve: Serve, upstream: Upstream) -> None:
    url = f"{upstream.url}/5"
    async with serve() as client:
        upstream.gate.clear()
        asking = asyncio.create_task(client.post("/sizes", json.dumps([url])))
        await upstream.asked(1)
        client.kill_worker()
        status, body = await asking
        assert (status, body["reason"][:7], "SIGKILL" in body["reason"]) == (502, "worker ", True)
        asking = asyncio.create_task(client.get("/size", url=url))
        await upstream.asked(1)
        client.kill_worker()
        await upstream.asked(1)
        upstream.gate.set()
        assert await asking == (200, 5)


async def test_the_service_page_refuses_what_is_too_much(serve: Serve, upstream: Upstream) -> None:
    async with serve(("max_pending=10_000", "max_pending=1")) as client:
        upstream.gate.clear()
        asking = asyncio.create_task(client.get("/size", url=f"{upstream.url}/5"))
        await upstream.asked(1)
        status, body = await client.post("/digest-or-refuse", "text")
        assert (status, list(body)) == (503, ["reason"])
        waiting = asyncio.create_task(client.post("/digest", "text"))
        upstream.gate.set()
        assert await asking == (200, 5)
        assert (await waiting)[0] == 200
