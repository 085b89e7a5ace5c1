"""An aiohttp application on every CPU: each worker serves it, on a socket that outlives the worker.

python examples/serve.py                                            # on http://127.0.0.1:8080/, until Ctrl-C or SIGTERM
python examples/serve.py 127.0.0.1:8000 unix:/tmp/app.sock
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

import percore


async def hello(request: web.Request) -> web.Response:
    return web.json_response({"hello": request.path, "worker": os.getpid()})


@asynccontextmanager
async def serve() -> AsyncIterator[None]:
    app = web.Application()
    app.router.add_get("/{path:.*}", hello)
    server = web.AppRunner(app, access_log=None, shutdown_timeout=4)
    await server.setup()
    sites = [web.SockSite(server, sock, backlog=4096) for sock in percore.current_worker().sockets]
    for site in sites:
        await site.start()
    yield
    for site in sites:
        await site.stop()  # accept no more
    await asyncio.sleep(0.1)  # let requests arrive on connections accepted a moment ago: they would be closed
    await server.cleanup()


async def main() -> None:
    async with percore.Runner(lifespan=serve, listen=sys.argv[1:] or ["127.0.0.1:8080"]) as runner:
        print("serving on", *runner.addresses, flush=True)
        stop = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(main())
