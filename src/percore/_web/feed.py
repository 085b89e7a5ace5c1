"""The snapshots that all viewers of a dashboard share: one reading at most in each interval, and none while nobody looks."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import asdict
from time import monotonic
from typing import Any, Final

import percore
from percore._common.errors import RunnerClosed
from percore._monitor.page import page_of
from percore._monitor.threads import in_thread
from percore._monitor.views import Model

LONGEST: Final = 5.0
"""Seconds after which a stream of snapshots ends, and browsers ask for the next one: a server that closes waits for it."""

_AGAIN: Final = 100
"""Milliseconds after which the browser asks again."""


_MOST_FUNCTIONS: Final = 8
"""Functions of each worker in a snapshot, those with the most time, so that snapshots stay small and their reading short."""


class Feed:
    """Reads the figures of a runner. Only the thread of the server's event loop may use it."""

    def __init__(self, runner_of: Callable[[], percore.Runner], interval: float, pid: int) -> None:
        """`runner_of`: returns the runner, which may be not started yet or closed already."""
        self._runner_of = runner_of
        self._interval = interval
        self._model = Model(pid)
        self._snapshot = ""
        self._read_at = -interval
        self._reading: asyncio.Task[str] | None = None

    async def snapshot(self) -> str:
        """Return the latest snapshot as JSON on one line. It is at most an interval old. All who wait share one reading."""
        if monotonic() - self._read_at < 0.9 * self._interval:
            return self._snapshot
        reading = self._reading
        if reading is None or reading.get_loop() is not asyncio.get_running_loop():  # that loop was closed in the midst of it
            reading = self._reading = asyncio.create_task(self._read())
            reading.add_done_callback(self._has_read)
        return await asyncio.shield(reading)

    async def stream(self) -> AsyncGenerator[str, None]:
        """Yield a snapshot each interval, for LONGEST seconds, as server-sent events."""
        end = monotonic() + LONGEST
        yield f"retry: {_AGAIN}\n\n"
        while monotonic() < end:
            yield f"data: {await self.snapshot()}\n\n"
            await asyncio.sleep(self._interval)

    async def _read(self) -> str:
        try:
            statistics = self._runner_of()._statistics(_MOST_FUNCTIONS)
        except RunnerClosed:
            return json.dumps({"at": monotonic(), "interval": self._interval, "view": None})
        elsewhere = await self._elsewhere() if any(worker.node for worker in statistics.workers) else ()
        now = monotonic()
        page = page_of(statistics, 1, now, now + self._interval, elsewhere)
        view = await in_thread("percore-dashboard", lambda: self._model.view([page]))
        body: dict[str, Any] = {"at": now, "interval": self._interval, "view": asdict(view)}
        return json.dumps(body, separators=(",", ":"))

    async def _elsewhere(self) -> Sequence[percore.ProcessUsage]:
        """Return what the processes of the runner use, those on nodes among them. Nothing, if they cannot be asked now."""
        try:
            return (await self._runner_of().usage()).processes
        except RuntimeError:  # the runner is closed, or a host cannot tell
            return ()

    def _has_read(self, reading: "asyncio.Task[str]") -> None:
        if self._reading is reading:
            self._reading = None
        if not reading.cancelled() and reading.exception() is None:
            self._snapshot, self._read_at = reading.result(), monotonic()
