"""`percore.watch_loop`. A loop is blocked until the warning about it has been logged."""

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from queue import Empty
from typing import Any

import pytest

import percore
from percore._runner import loop_watch
from percore._runner.loop_watch import _STOP, _LoopWatcher


class Seen(logging.Handler):
    """Waits for log messages, by a part of their text."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._new = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self._new:
            self.texts.append(record.getMessage())
            self._new.notify_all()

    def wait(self, part: str) -> str:
        with self._new:
            assert self._new.wait_for(lambda: any(part in text for text in self.texts), timeout=40)
            return next(text for text in self.texts if part in text)


@pytest.fixture
def seen() -> Iterator[Seen]:
    handler = Seen()
    logging.getLogger("percore").addHandler(handler)
    yield handler
    logging.getLogger("percore").removeHandler(handler)


async def test_a_blocked_loop_is_reported_with_its_stack(seen: Seen) -> None:
    with percore.watch_loop(0.05):
        text = seen.wait("the event loop has been blocked for ")  # this blocks it
        assert "in test_a_blocked_loop_is_reported_with_its_stack" in text
        await asyncio.to_thread(seen.wait, "the event loop goes on, after ")
    assert not [thread for thread in threading.enumerate() if thread.name == "percore-watch-loop"]


async def test_a_loop_that_runs_is_not_reported_and_the_end_is_prompt(seen: Seen) -> None:
    with percore.watch_loop(30.0):
        await asyncio.sleep(0)
    assert seen.texts == []


async def test_the_end_while_a_block_is_reported(seen: Seen) -> None:
    with percore.watch_loop(0.05):
        seen.wait("the event loop has been blocked for ")


async def test_code_that_holds_the_gil_is_reported_afterwards(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watching thread finds that it was late itself, and that the process has used the CPU meanwhile."""
    ticks = itertools.count()
    monkeypatch.setattr(loop_watch, "monotonic", lambda: float(next(ticks)))
    monkeypatch.setattr(loop_watch, "process_time", lambda: float(next(ticks)))
    with percore.watch_loop(0.01):
        text = await asyncio.to_thread(seen.wait, "all threads with it")
    assert "the event loop was blocked for " in text


class Pauses:
    """A loop that runs each callback at once, and the queue of a watching thread. Each wait for a message that has not come ends.

    `is_busy`: the loop runs the second callback of a number when it is sent the next number.
    """

    def __init__(self, is_busy: bool) -> None:
        self._is_busy = is_busy
        self._messages: list[tuple[int, float]] = []
        self._late: list[Callable[[], None]] = []
        self._sent: dict[int, int] = {}
        self.count = 0

    def call_soon_threadsafe(self, ran: Callable[[int], None], number: int) -> None:
        if number > 10:
            raise RuntimeError("too many")
        self._sent[number] = self._sent.get(number, 0) + 1
        if self._sent[number] == 2 and self._is_busy:
            self._late.append(lambda: ran(number))
            return
        while self._late:
            self._late.pop()()
        ran(number)

    def put(self, message: tuple[int, float]) -> None:
        self._messages.append(message)

    def get(self, timeout: float | None) -> tuple[int, float]:
        if self._messages:
            return self._messages.pop(0)
        self.count += 1
        if self.count > 3:
            return 0, _STOP
        raise Empty


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_the_thread_pauses_after_each_callback(is_busy: bool, seen: Seen) -> None:
    """The loop gets each callback twice. The second one must neither end the pause nor answer the next callback."""
    loop: Any = Pauses(is_busy)
    watcher = _LoopWatcher(loop, 1000.0)
    watcher._heard = loop
    watcher._run()
    assert (loop.count, watcher._number, seen.texts) == (4, 3, [])


async def test_wrong_use() -> None:
    with pytest.raises(ValueError, match="blocked_after must be a positive number of seconds, not 0"):
        percore.watch_loop(0).__enter__()
    with pytest.raises(TypeError, match="blocked_after must be a number of seconds, not None"):
        percore.watch_loop(None).__enter__()  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="use it inside a coroutine"):
        await asyncio.to_thread(percore.watch_loop().__enter__)
