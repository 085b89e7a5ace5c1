"""A dashboard in the browser, metrics for Prometheus, and answers for probes. `pip install percore[web]`.

app.add_subapp("/percore", percore.web.dashboard(runner).application())  # aiohttp
app.mount("/percore", percore.web.dashboard(runner))                     # FastAPI, Starlette: any ASGI
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import percore
from percore._common.options import seconds_of

try:
    from percore._web.asgi import Receive, Scope, Send, respond
    from percore._web.dashboard import Pages
    from percore._web.metrics import RunnerCollector
except ModuleNotFoundError as _error:
    if (_error.name or "").partition(".")[0] != "prometheus_client":
        raise
    raise ImportError("percore.web needs prometheus-client: pip install percore[web]") from _error

if TYPE_CHECKING:
    from aiohttp.web import Application

__all__ = ["Dashboard", "RunnerCollector", "dashboard"]


def dashboard(
    runner: percore.Runner | Callable[[], percore.Runner], *, actions: bool = False, interval: float = 1.0
) -> "Dashboard":
    """Return a dashboard of a runner, to be put into a server that the program has.

    It shows the workers and functions live, and has these paths below the place where it is:

    | path | what it answers |
    |---|---|
    | `/` | the page: one HTML file without outside resources |
    | `/events` | snapshots as server-sent events, one each interval; the stream ends after five seconds, and browsers ask again |
    | `/statistics` | one snapshot, as JSON |
    | `/metrics` | the figures for Prometheus, as those of RunnerCollector |
    | `/health` | 200, or 503 if the runner is not started or closed, or none of its workers can be started |
    | `/ready` | 200 if a worker is ready for calls and its event loop is not blocked, else 503 |

    percore binds no address and asks nobody who they are: put it where only those come who may see names of functions and workers.
    While nobody looks, it reads nothing.

    Args:
        runner: the runner, started or not; or a function that returns it, for programs that make theirs later.
        actions: whether the page can recycle workers.
        interval: seconds between two snapshots.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """
    if not isinstance(runner, percore.Runner) and not callable(runner):
        raise TypeError(f"dashboard(...) takes a Runner or a function that returns one, not {type(runner).__name__}")
    return Dashboard(runner, actions=actions, interval=seconds_of("interval", interval))


class Dashboard:
    """A dashboard, as `dashboard` returns it: an ASGI application, and by `application()` one of aiohttp."""

    def __init__(self, runner: percore.Runner | Callable[[], percore.Runner], *, actions: bool, interval: float) -> None:
        def given() -> percore.Runner:
            return runner if isinstance(runner, percore.Runner) else runner()

        self._pages = Pages(given, actions=actions, interval=interval)

    def application(self) -> "Application":
        """Return it as an application of aiohttp, for `add_subapp`. Each call returns another one.

        Raises:
            ImportError: aiohttp is not installed.
        """
        from percore._web.aiohttp_application import application

        return application(self._pages)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> Any:
        """Answer a request of an ASGI server or framework."""
        if scope["type"] == "http":
            await respond(self._pages, scope, receive, send)
        elif scope["type"] == "lifespan":
            await _live(receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})


async def _live(receive: Receive, send: Send) -> None:
    """Take part in the start and shutdown of a server that serves nothing else."""
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
