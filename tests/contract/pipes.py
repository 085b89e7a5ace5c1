"""Events across processes, without time: named pipes in the test's own folder.

A Gate is shut until it is opened; whoever waits at it (jobs.pass_gate, jobs.apass_gate) then goes on, now and ever after.
A Log receives lines that calls say (jobs.say), in the order they said them. The fixtures make them: `gate`, `other_gate`, `log`.
"""

import asyncio
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest


class _Pipe:
    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        # Open at both ends: what was written stays there, and nobody's open() ever blocks.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._fd)


class Gate(_Pipe):
    """Opened once."""

    def open(self) -> None:
        """Let everybody through. Nobody reads the byte, so the pipe stays readable."""
        os.write(self._fd, b"!")

    def close(self) -> None:
        """Let through whoever still waits, and refuse whoever comes later: no thread is left behind."""
        os.unlink(self.path)
        self.open()
        super().close()


class Log(_Pipe):
    """What calls have said."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._lines: list[str] = []
        self._rest = ""

    async def next(self) -> str:
        """The next line; waits for it."""
        while not self._lines:
            await self._readable()
            self._read()
        return self._lines.pop(0)

    async def take(self, count: int) -> list[str]:
        """So many lines."""
        return [await self.next() for _ in range(count)]

    def rest(self) -> list[str]:
        """What has been said by now and was not taken."""
        self._read()
        lines, self._lines = self._lines, []
        return lines

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                return
            *lines, self._rest = (self._rest + data.decode()).split("\n")
            self._lines += lines

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        readable = loop.create_future()
        loop.add_reader(self._fd, _set, readable)
        try:
            await readable
        finally:
            loop.remove_reader(self._fd)


def _set(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with closing(Gate(tmp_path / "gate")) as gate:
        yield gate


@pytest.fixture
def other_gate(tmp_path: Path) -> Iterator[Gate]:
    with closing(Gate(tmp_path / "other_gate")) as gate:
        yield gate


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with closing(Log(tmp_path / "log")) as log:
        yield log
