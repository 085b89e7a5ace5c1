"""A server of aiohttp in the test's own loop, for programs under test to ask."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(app: web.Application, patience: float = 0.1) -> AsyncIterator[str]:
    """Serve an application: its URL. A client that leaves cancels its handler; at the end, so do `patience` seconds."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=patience)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def answering(path: str, handler: Handler) -> web.Application:
    """An application of one handler, which GET requests of such paths reach."""
    app = web.Application()
    app.router.add_get(path, handler)
    return app
