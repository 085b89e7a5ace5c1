"""What the tests of launch styles, hosts and surroundings share: a way to run real commands, and functions for workers.

Light on purpose: every worker that runs one of the functions imports this module.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

TIMEOUT = 40.0
"""Seconds a command may take before it counts as hanging; pytest's own limit is above it."""


class Done(NamedTuple):
    """How a command has ended."""

    code: int
    out: str
    err: str


def execute(
    command: Sequence[str | Path],
    *,
    cwd: Path,
    given: str | None = None,
    environment: Mapping[str, str | Path] | None = None,
) -> Done:
    """Run a command to its end, `given` on its standard input."""
    # Unbuffered streams would flush what workers have to flush.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**inherited, **{name: str(value) for name, value in (environment or {}).items()}},
        input="" if given is None else given,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def python(
    *arguments: str | Path,
    cwd: Path,
    given: str | None = None,
    environment: Mapping[str, str | Path] | None = None,
) -> Done:
    """Run this interpreter with these arguments."""
    return execute([sys.executable, *arguments], cwd=cwd, given=given, environment=environment)


def output_of(script: str, folder: Path, *arguments: str, environment: Mapping[str, str | Path] | None = None) -> str:
    """What a program prints that must end well and complain of nothing."""
    (folder / "program.py").write_text(script)
    done = python("program.py", *arguments, cwd=folder, environment=environment)
    assert (done.code, done.err) == (0, ""), done
    return done.out


# Functions for workers


def pid() -> int:
    return os.getpid()


async def pid_of_task() -> int:
    return os.getpid()


def wait_at_gate(gate: str) -> tuple[int, str]:
    """Say that this call has begun, and wait, in its thread, to be let go."""
    _tell_begun(gate)
    return os.getpid(), _let_go(os.open(f"{gate}.open", os.O_RDONLY))


async def wait_at_gate_in_task(gate: str) -> tuple[int, str]:
    """Say that this call has begun, and wait, in the loop, to be let go."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    fd = os.open(f"{gate}.open", os.O_RDONLY)
    loop.add_reader(fd, readable.set)
    _tell_begun(gate)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(fd)
    return os.getpid(), _let_go(fd)


def _tell_begun(gate: str) -> None:
    Path(f"{gate}.begun").write_text("begun")


def _let_go(fd: int) -> str:
    try:
        return os.read(fd, 100).decode()
    finally:
        os.close(fd)


def double(number: int) -> int:
    return 2 * number


async def double_in_task(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


async def loop_traits() -> tuple[str, bool]:
    loop = asyncio.get_running_loop()
    return type(loop).__module__.partition(".")[0], loop.get_debug()
