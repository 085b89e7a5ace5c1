"""The dashboard without a server: paths to answers. `asgi` and `application` give it a face."""

import os
import signal
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Final, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

import percore
from percore._attach.stacks import is_worker
from percore._common.errors import RunnerClosed
from percore._web.feed import Feed
from percore._web.metrics import RunnerCollector

if TYPE_CHECKING:
    from percore._monitor.statistics import WorkerStatistics

_TEXT: Final = "text/plain; charset=utf-8"
_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'"
)
"""What the page may do: it has its styles and its script inside, and asks only the server that it comes from."""


class Answer(NamedTuple):
    """What a request gets.

    Attributes:
        status: the status code.
        kind: the content type.
        body: the whole body; or a stream of server-sent events.
    """

    status: int
    kind: str
    body: bytes | AsyncGenerator[str, None]

    def headers(self) -> dict[str, str]:
        """Return the headers: nothing of a dashboard is to be stored, framed or taken for something else."""
        return {
            "Content-Type": self.kind,
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Content-Security-Policy": f"{_POLICY}; frame-ancestors 'self'",
        }


@dataclass(frozen=True, slots=True)
class Request:
    """A request, as any server has it.

    Attributes:
        method: such as "GET".
        path: the path below the place where the dashboard is, such as "/metrics"; "" and "/": the page.
        headers: by names in lower case.
    """

    method: str
    path: str
    headers: Mapping[str, str]


class Pages:
    """Answers requests for one runner."""

    def __init__(self, runner_of: Callable[[], percore.Runner], *, actions: bool, interval: float) -> None:
        self._runner_of = runner_of
        self._actions = actions
        self._feed = Feed(runner_of, interval, os.getpid())

    async def answer(self, request: Request) -> Answer:
        """Return the answer to a request. It raises what the reading of the runner raises."""
        reads = {
            "": self._page,
            "/": self._page,
            "/events": self._events,
            "/statistics": self._statistics,
            "/metrics": self._metrics,
            "/health": self._health,
            "/ready": self._ready,
        }
        if request.path.startswith("/recycle/"):
            return self._recycle(request)
        read = reads.get(request.path)
        if read is None:
            return _said(404, f"{request.path}: the dashboard has no such page")
        if request.method not in ("GET", "HEAD"):
            return _said(405, "this page can only be read")
        return await read(request)

    async def _page(self, _: Request) -> Answer:
        page = files(percore).joinpath("_web", "dashboard.html").read_text(encoding="utf-8")
        page = page.replace("/*ACTIONS*/false", "true" if self._actions else "false", 1)
        return Answer(200, "text/html; charset=utf-8", page.encode())

    async def _events(self, request: Request) -> Answer:
        return Answer(200, "text/event-stream", b"" if request.method == "HEAD" else self._feed.stream())

    async def _statistics(self, _: Request) -> Answer:
        return Answer(200, "application/json", (await self._feed.snapshot()).encode())

    async def _metrics(self, request: Request) -> Answer:
        registry = CollectorRegistry()
        registry.register(RunnerCollector(self._runner_of()))
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        return Answer(200, kind, encode(registry))

    async def _health(self, _: Request) -> Answer:
        """Tell whether a restart of the program would help: it has no runner that could do anything."""
        workers = self._workers()
        if workers is None:
            return _said(503, "the runner is not started, or it is closed")
        if all(worker.state == "failed" for worker in workers):
            return _said(503, "no worker can be started")
        return _said(200, "ok")

    async def _ready(self, _: Request) -> Answer:
        """Tell whether a call would begin now: a worker whose event loop is blocked begins none."""
        workers = self._workers() or ()
        ready = sum(worker.state == "ready" and not worker.blocked_for for worker in workers)
        return _said(200 if ready else 503, f"{ready} of {len(workers)} workers are ready")

    def _workers(self) -> "tuple[WorkerStatistics, ...] | None":
        try:
            return self._runner_of()._statistics(0).workers
        except RunnerClosed:
            return None

    def _recycle(self, request: Request) -> Answer:
        if not self._actions:
            return _said(403, "this dashboard is read-only: dashboard(runner, actions=True)")
        if request.method != "POST":
            return _said(405, "POST recycles a worker")
        # A page of another site can neither set this header nor, in today's browsers, hide where it comes from.
        if request.headers.get("x-percore") != "recycle" or request.headers.get("sec-fetch-site", "same-origin") != "same-origin":
            return _said(403, "only the dashboard's own page may ask for this")
        number = request.path.removeprefix("/recycle/")
        try:
            workers = {str(worker.index): worker.pid for worker in self._runner_of()._statistics(0).workers if not worker.node}
        except RunnerClosed:
            workers = {}
        pid = workers.get(number)
        try:
            if pid is None or not is_worker(pid):
                raise ProcessLookupError
            os.kill(pid, signal.SIGTERM)  # it finishes its calls and ends, and another one takes its place
        except ProcessLookupError:  # perhaps it has ended since the look
            return _said(404, f"worker {number} has no process on this machine")
        return _said(202, f"worker {number} ({pid}) was asked to end")


def _said(status: int, text: str) -> Answer:
    return Answer(status, _TEXT, f"{text}\n".encode())
