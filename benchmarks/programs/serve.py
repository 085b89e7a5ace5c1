"""Applications that answer with the pid of their worker, and `serve.py SERVER WORKERS [shared]`: percore serves one of them.

With `shared` its workers share one socket, as they do where the system divides no connections. It prints its address, and
ends with its standard input.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from contextlib import asynccontextmanager, nullcontext
from typing import TYPE_CHECKING

import percore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager, AbstractContextManager

    from aiohttp import web
    from starlette.applications import Starlette
    from starlette.requests import Request


def asgi() -> Starlette:
    """An application of Starlette."""
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    async def answer(_request: Request) -> PlainTextResponse:
        return PlainTextResponse(str(os.getpid()))

    return Starlette(routes=[Route("/", answer)])


async def web_app() -> web.Application:
    """An application of aiohttp."""
    from aiohttp import web

    async def answer(_request: web.Request) -> web.Response:
        return web.Response(text=str(os.getpid()))

    app = web.Application()
    app.router.add_get("/", answer)
    return app


@asynccontextmanager
async def serve_aiohttp() -> AsyncIterator[None]:
    from aiohttp import web

    server = web.AppRunner(await web_app(), access_log=None, shutdown_timeout=1)
    await server.setup()
    for sock in percore.current_worker().sockets:
        await web.SockSite(server, sock, backlog=2048).start()
    yield
    await server.cleanup()


@asynccontextmanager
async def serve_uvicorn() -> AsyncIterator[None]:
    import uvicorn

    class Server(uvicorn.Server):
        def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
            return nullcontext()

    server = Server(uvicorn.Config(asgi(), access_log=False, log_level="warning"))
    serving = asyncio.create_task(server.serve(sockets=list(percore.current_worker().sockets)))
    yield
    server.should_exit = True
    await serving


LIFESPANS: dict[str, Callable[[], AbstractAsyncContextManager[None]]] = {"aiohttp": serve_aiohttp, "uvicorn": serve_uvicorn}


async def main(server: str, workers: int, *, is_shared: bool) -> None:
    listen = socket.create_server(("127.0.0.1", 0)) if is_shared else "127.0.0.1:0"
    async with percore.Runner(workers, lifespan=LIFESPANS[server], listen=[listen]) as runner:
        print(*runner.addresses, flush=True)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), ended.set)
        await ended.wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), is_shared=sys.argv[3:] == ["shared"]))
