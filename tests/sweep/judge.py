"""Outside of the processes under test: plans strikes, hears of hits, and believes only the kernel and files."""

import json
import os
import select
import shutil
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest

from tests.faults import LIMIT, Program, Watch
from tests.sweep import calls

HARD = 2.0
"""Seconds after a supervisor's death within which nothing of it may be left."""

PATIENCE = 0.25
"""Seconds that a further passing of a place may take to come, before what holds the state up is let go. Nothing is judged by it."""


class Hit(NamedTuple):
    """A strike, as the process that was struck has told it."""

    place: str
    action: str
    nth: int
    worker: str
    pid: int
    states: list[str]

    @classmethod
    def parse(cls, line: str) -> "Hit":
        place, action, nth, worker, pid, *states = line.split()
        return cls(place, action, int(nth), worker, int(pid), states)

    @property
    def full_count(self) -> int:
        return next((int(word.partition("=")[2]) for word in self.states if word.startswith("full_count=")), 0)


class Stage:
    """A program under test, the folder that its places look at, and what is heard of it."""

    def __init__(self, folder: Path, loop: str = "asyncio") -> None:
        self.folder = folder
        folder.mkdir()
        self._fifos = {}
        for name in ("hits", "gate", "stay", "orders"):
            os.mkfifo(folder / name)
            # For reading too: so nothing written is lost, and nobody waits for the other side.
            self._fifos[name] = os.open(folder / name, os.O_RDWR | os.O_NONBLOCK)
        self._buffer = b""
        self.struck: list[int] = []
        self._first, self._last = 1, 0
        self._read_to = {"ledger": 0, "outcomes": 0}
        self._lines: dict[str, dict[int, list[list[str]]]] = {"ledger": {}, "outcomes": {}}
        self.program = Program(str(folder), loop, stderr=folder / "stderr", points=str(folder), module="tests.sweep.program")
        self.program.expect("ready")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            self.program.__exit__(kind, error, trace)
        finally:
            with Watch(processes_of(self.folder)) as everybody:
                left = everybody.wait_gone(HARD)
                everybody.kill()
            for fd in self._fifos.values():
                os.close(fd)
            if kind is None:
                assert left == []
                shutil.rmtree(self.folder)

    # Orders and strikes

    def order(self, do: str, **more: Any) -> None:
        os.write(self._fifos["orders"], json.dumps({"do": do, **more}).encode() + b"\n")

    def told(self, word: str) -> Any:
        return self.program.told(word)

    def open(self, workers: int, method: str = "forkserver") -> None:
        """A new runner."""
        self.order("open", workers=workers, method=method)
        assert self.told("opened")["error"] == ""

    def pids(self) -> list[int]:
        """Of the workers, by index."""
        self.order("tell")
        pids: list[int] = self.told("pids")
        return pids

    def plan(self, place: str, plan: str) -> None:
        new = self.folder / "plan"
        new.write_text(plan)
        new.rename(self.folder / place)

    def unplan(self) -> None:
        """Forget the plans that nobody has carried out."""
        for path in self.folder.iterdir():
            if "." in path.name:
                path.unlink(missing_ok=True)  # a worker claims its plan at any time
        self.drain("stay")
        self.drain("gate")

    def drain(self, name: str) -> None:
        """Bytes that nobody has taken any more."""
        while select.select([self._fifos[name]], [], [], 0)[0]:
            os.read(self._fifos[name], 4096)

    def give(self, name: str, count: int = 1) -> None:
        """Let so many go on."""
        os.write(self._fifos[name], b"." * count)

    def hit(self, seconds: float = LIMIT) -> Hit | None:
        """The next hit; None: there is none so soon, or the program has ended."""
        deadline = time.monotonic() + seconds
        while True:
            while b"\n" in self._buffer:
                line, _, self._buffer = self._buffer.partition(b"\n")
                if line.startswith(b"struck"):
                    self.struck.append(int(line.split()[2]))
                else:
                    return Hit.parse(line.decode())
            if not select.select([self._fifos["hits"]], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            self._buffer += os.read(self._fifos["hits"], 65536)

    def hit_of(self, place: str, seconds: float) -> Hit | None:
        """As `hit`, for this place alone."""
        while (hit := self.hit(seconds)) is not None and hit.place != place:
            pass
        return hit

    # Judging

    def judge(self, struck: set[int] | None, *, code: int | None = None, cut: bool = False) -> None:
        """Compare what was told of the calls since the last time with the ledger.

        `struck`: who may have died; None: anybody. `code`: their exit code, if known. `cut`: the runner was closed.
        """
        ran, ends = self._read("ledger"), self._read("outcomes")
        first, last = self._first, self._last
        self._first = last + 1
        for uuid in range(first, last + 1):
            assert len(ends.get(uuid, [])) == 1, f"call {uuid} ended {len(ends.get(uuid, []))} times"
            assert len(ran.get(uuid, [])) <= 1, f"call {uuid} ran twice: {ran[uuid]}"
            words = ends[uuid][0]
            if words[0] == "died":
                self._judge_death(uuid, words, ran.get(uuid), struck, cut=cut)
                assert code is None or words[3] == str(code), f"call {uuid} died with exit code {words[3]}, not {code}"
            else:
                self._judge_end(uuid, words, ran.get(uuid), cut=cut)

    def _judge_death(self, uuid: int, words: list[str], ran: list[list[str]] | None, struck: set[int] | None, *, cut: bool) -> None:
        _, started, pid, _ = words
        assert struck is None or int(pid) in struck, f"call {uuid} died with {pid}, and {struck} were struck"
        if started == "1":
            assert not ran or ran[0][0] == pid, f"call {uuid} ran in {ran}, and died with {pid}"
        else:
            assert cut, f"call {uuid} had not started and was not sent to another worker"
            assert not ran, f"call {uuid} had not started, says its error, and ran"

    def _judge_end(self, uuid: int, words: list[str], ran: list[list[str]] | None, *, cut: bool) -> None:
        match words:
            case [("value" | "error"), value]:
                assert ran, f"call {uuid} has an outcome and never ran"
                assert value == str(calls.answer(uuid)), f"call {uuid} has another call's outcome"
            case ["bytes", size, crc]:
                assert ran, f"call {uuid} has a result and never ran"
                assert int(crc) == zlib.crc32(calls.pattern(uuid, int(size))), f"call {uuid} has another call's result"
            case ["RunnerClosed", *_] if cut:
                pass
            case _:
                pytest.fail(f"call {uuid} ended with {words}")

    def _read(self, name: str) -> dict[int, list[list[str]]]:
        """Lines by call, as far as they are written."""
        found, path = self._lines[name], self.folder / name
        if path.exists():
            with open(path, "rb") as file:
                file.seek(self._read_to[name])
                lines = file.read().rpartition(b"\n")[0]
            self._read_to[name] += len(lines) + bool(lines)
            for line in lines.decode().splitlines():
                uuid, *words = line.split()
                found.setdefault(int(uuid), []).append(words)
        return found

    def killed(self, pid: int) -> None:
        """It is dead, or about to be."""
        with Watch([pid]) as it:
            assert it.wait_gone(LIMIT) == [], f"{pid} outlived its strike"

    def settle(self) -> list[Hit]:
        """Everything ends, it serves some more, and is whole again: the hits that nobody has asked for yet."""
        self.order("end")
        self.program.expect("ended")
        self.unplan()
        self.order("serve")
        served = self.told("served")
        assert (served["held"], served["arena"], served["complaints"]) == (0, 0, []), served
        self._last = served["last"]
        hits = []
        while (hit := self.hit(0)) is not None:  # only now: a worker rings late, too, and may have taken the plan just before
            hits.append(hit)
        return hits

    def close(self) -> None:
        """Close the runner: nothing is left of it but the program and its fork server."""
        self.order("close")
        self.closed()

    def closed(self) -> None:
        """Wait for the end of the order "close"."""
        closed = self.told("closed")
        self._last = closed["last"]
        assert (closed["pending"], closed["left"], closed["complaints"]) == (0, [], [])
        assert len(processes_of(self.folder)) <= 2

    def leave(self) -> None:
        """The program ends in order."""
        self.order("leave")
        self.told("interrupts")
        assert self.program.end() == 0
        assert self.program.stderr == ""


def processes_of(folder: Path) -> list[int]:
    """Everybody alive who was started with this folder in the environment, forks of them included."""
    needle = f"PERCORE_POINTS={folder}\0".encode()
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                environment = Path(entry.path, "environ").read_bytes()
            except OSError:
                continue
            if needle in environment + b"\0":
                found.append(int(entry.name))
    return found
