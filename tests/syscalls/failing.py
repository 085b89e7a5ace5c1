"""Each system call that percore makes fails, the first time, the second time, and so on until a run makes no more of them.

strace attaches to a program of `tests.syscalls.program` and to its workers, and lets the N-th call of each of their threads fail
with one error, in one stage of a runner's life: a start, calls, large calls, streams, the replacement of a worker, reload, close.
Whatever fails, nothing may hang, get a wrong value or be left. The runner, or a new one if this one is broken, serves afterwards.

`make syscalls` runs it by name, because it takes minutes. SYSCALLS_MOST bounds N.
"""

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults import ROOT
from tests.syscalls.program import STAGES

STRACE = shutil.which("strace")
MOST = int(os.environ.get("SYSCALLS_MOST", "200"))
LIMIT = 90.0
"""Seconds after which a stage hangs. A worker that cannot start is tried ten times, which takes half a minute."""

ERRORS = {
    "mmap": ["ENOMEM"],  # not while threads start: see STAGES_OF
    "memfd_create": ["EMFILE", "ENOMEM"],
    "eventfd2": ["EMFILE", "ENFILE"],
    "socketpair": ["EMFILE"],
    "pipe2": ["EMFILE"],
    "clone,clone3,fork,vfork": ["EAGAIN"],
    "sendmsg": ["ENOMEM", "EAGAIN", "EINTR"],
    "recvmsg": ["ENOMEM", "EAGAIN", "EINTR"],
    "epoll_ctl": ["ENOMEM", "ENOSPC"],
    "epoll_wait,epoll_pwait": ["EINTR"],
    "pidfd_open": ["EMFILE"],
    "pidfd_send_signal": ["EPERM"],
    "ftruncate": ["ENOSPC"],
    "fallocate": ["ENOSPC", "EINTR"],
    "madvise": ["ENOMEM"],
    "fcntl": ["EMFILE"],
    "dup,dup2,dup3": ["EMFILE"],
    "read": ["EINTR"],
    "write": ["EAGAIN", "EINTR"],
}
"""The errors of each system call. A comma: several names of one."""

STAGES_OF = {"mmap": ["start", "big", "respawn", "reload", "close"]}
"""The stages of a system call, if not all. `threading.Thread.start` waits for ever for a thread that finds no memory."""

EXPECTED = ("OSError", "MemoryError", "PercoreError", "RuntimeError", "ImportError")
"""Work may end with one of these or a subclass: the error itself, percore's, "can't start new thread", "failed to map segment"."""


@dataclass
class Run:
    """What one run told: the outcomes of the stage, and the end."""

    hits: int
    stage: list[str]
    end: dict[str, Any]
    status: int


class Hang(AssertionError):
    """The program said nothing for too long, or ended before it had told its story."""


@contextlib.contextmanager
def program(stage: str, stderr: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Run the program. At the end kill what is left of it."""
    with open(stderr, "wb") as error:
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "tests.syscalls.program", stage],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=error,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def told(process: "subprocess.Popen[bytes]", word: str, stderr: Path) -> Any:
    """Return what the program's next line says after this word."""
    assert process.stdout is not None
    line = _line(process)
    if not line.startswith(word + " "):
        raise Hang(f"{word!r} was expected and {line!r} was said\n{stderr.read_text()[-4000:]}")
    return json.loads(line[len(word) :])


def _line(process: "subprocess.Popen[bytes]") -> str:
    assert process.stdout is not None
    fd, data = process.stdout.fileno(), b""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while not data.endswith(b"\n"):
        if not poller.poll(LIMIT * 1000):
            return f"nothing for {LIMIT:g} s"
        piece = os.read(fd, 1 << 16)
        if not piece:
            return f"the end: status {process.wait()}"
        data += piece
    return data.decode()


def run(stage: str, call: str, error: str, number: int, folder: Path) -> Run:
    """Run the program with the N-th call of each thread failing in this stage."""
    stderr, log = folder / "stderr", folder / "strace"
    with program(stage, stderr) as process:
        assert process.stdin is not None
        pids = told(process, "attach", stderr)
        assert STRACE is not None
        inject = f"inject={call}:error={error}:when={number}"
        command = [STRACE, "-f", "-o", str(log), "-e", f"trace={call}", "-e", inject, *(f"-p{pid}" for pid in pids)]
        tracer = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        try:
            _attached(tracer, len(pids))
            process.stdin.write(b"\n")
            process.stdin.flush()
            outcomes = told(process, "stage", stderr)
        finally:
            _let_go(tracer)
        process.stdin.write(b"\n")
        process.stdin.flush()
        end = told(process, "end", stderr)
        status = process.wait(LIMIT)
    hits = len(re.findall(r"\(INJECTED\)", log.read_text())) if log.exists() else 0
    return Run(hits, outcomes, end, status)


def _let_go(tracer: "subprocess.Popen[bytes]") -> None:
    """End strace, which lets everybody go."""
    tracer.send_signal(signal.SIGINT)
    try:
        tracer.communicate(timeout=30)
    except subprocess.TimeoutExpired:  # it waits for a process that has gone meanwhile
        tracer.kill()
        tracer.communicate()


def _attached(tracer: "subprocess.Popen[bytes]", count: int) -> None:
    """Wait until strace has told that it follows all processes."""
    assert tracer.stderr is not None
    seen = 0
    while seen < count:
        line = tracer.stderr.readline()
        assert line, f"strace ended with {tracer.wait()}: it may not be permitted to attach"
        seen += b"attached" in line


def judge(found: Run) -> list[str]:
    """Return what is wrong."""
    wrong = [one for one in found.stage if one != "ok" and ("WRONG" in one or not any(name in one for name in EXPECTED))]
    wrong += [f"afterwards: {one}" for one in found.end["after"] if one != "ok"]
    wrong += [f"left: {one}" for one in found.end["left"]]
    wrong += [f"in the loop: {one}" for one in found.end["errors"]]
    if found.status:
        wrong.append(f"it ended with {found.status}")
    return wrong


@pytest.mark.skipif(STRACE is None, reason="strace is not installed: it lets system calls fail")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("call", "error", "stage"),
    [(call, error, stage) for call, errors in ERRORS.items() for error in errors for stage in STAGES_OF.get(call, STAGES)],
)
def test_r7_a_system_call_that_fails_costs_no_more_than_its_call(call: str, error: str, stage: str) -> None:
    wrong = []
    with tempfile.TemporaryDirectory() as name:
        for number in range(1, MOST + 1):
            try:
                found = run(stage, call, error, number, Path(name))
            except Hang as hang:
                wrong.append(f"{call} {error} when {number}: {hang}")
                continue
            wrong += [f"{call} {error} when {number}: {one}" for one in judge(found)]
            if not found.hits:
                break
    assert not wrong, "\n".join(wrong)
