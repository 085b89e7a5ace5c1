"""A Starlette application on every CPU: each worker serves it with uvicorn, on a socket that outlives the worker.

python examples/serve_asgi.py                                       # on http://127.0.0.1:8080/, until Ctrl-C or SIGTERM
python examples/serve_asgi.py 127.0.0.1:8000 unix:/tmp/app.sock
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import percore


async def hello(request: Request) -> JSONResponse:
    return JSONResponse({"hello": request.url.path, "worker": os.getpid()})


app = Starlette(routes=[Route("/{path:path}", hello)])


class Server(uvicorn.Server):
    def __init__(self) -> None:
        super().__init__(uvicorn.Config(app, access_log=False, log_level="warning", timeout_graceful_shutdown=4))
        self.is_up = asyncio.Event()
        self.is_over = False

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()  # SIGTERM and Ctrl-C are percore's: it ends the lifespan

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.should_exit:
            raise RuntimeError("the application has not started")
        self.is_up.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()  # accept no more
        await asyncio.sleep(0.1)  # let requests arrive on connections accepted a moment ago: they would be closed
        await super().shutdown(sockets)

    async def run_until_over(self) -> None:
        await self.serve(sockets=list(percore.current_worker().sockets))
        if not self.is_over:
            raise RuntimeError("the server has ended by itself")


@asynccontextmanager
async def serve() -> AsyncIterator[None]:
    server = Server()
    async with asyncio.TaskGroup() as group:
        group.create_task(server.run_until_over())
        await server.is_up.wait()
        yield
        server.is_over = server.should_exit = True


async def main() -> None:
    async with percore.Runner(lifespan=serve, listen=sys.argv[1:] or ["127.0.0.1:8080"]) as runner:
        print("serving on", *runner.addresses, flush=True)
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(main())
