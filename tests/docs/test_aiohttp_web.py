"""The page "Use percore in aiohttp.web": its service answers, tells of a death, repeats and refuses."""

import asyncio
import hashlib
import importlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

import percore
from tests.docs.blocks import DOCS, blocks_of
from tests.serving import answering, serving

PAGE = DOCS / "how-to" / "aiohttp-web.md"
PATIENCE = 10.0


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


@pytest_asyncio.fixture
async def upstream() -> AsyncIterator[Upstream]:
    upstream = Upstream()
    async with serving(answering("/{size}", upstream.answer), PATIENCE) as upstream.url:
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
    """Saves the files of the page, with these changes, and runs its app."""

    @asynccontextmanager
    async def served(*changes: tuple[str, str]) -> AsyncIterator[Client]:
        monkeypatch.syspath_prepend(tmp_path)
        pages: dict[str, Any] = {}
        for block in (block for block in blocks_of(PAGE) if block.title):
            source = block.text
            for old, new in changes:
                source = source.replace(old, new)
            path = tmp_path / str(block.title)
            path.write_text(source)
            monkeypatch.setitem(sys.modules, path.stem, None)
            del sys.modules[path.stem]
            pages[path.stem] = importlib.import_module(path.stem)
        app = pages["app"].make_app()
        async with serving(app, PATIENCE) as url, aiohttp.ClientSession() as session:
            yield Client(session, url, app[pages["app"].RUNNER])

    return served


async def test_the_service_page_answers(serve: Serve, upstream: Upstream) -> None:
    urls = [f"{upstream.url}/{size}" for size in (3, 1, 2)]
    digest = hashlib.scrypt(b"text", salt=b"percore", n=2**12, r=8, p=1).hex()[:16]
    async with serve() as client:
        assert await client.post("/digest", "text") == (200, digest)
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
        status, body = await client.post("/order", "text")
        assert (status, list(body)) == (503, ["reason"])
        waiting = asyncio.create_task(client.post("/digest", "text"))
        upstream.gate.set()
        assert await asking == (200, 5)
        assert (await waiting)[0] == 200
