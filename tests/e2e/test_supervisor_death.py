"""The supervisor's death by SIGKILL ends every worker and the fork server, whatever they are doing."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.faults import Program, Watch, figures, wait_stopped

HARD = 2.0
ROUNDS = {"forkserver": 5, "spawn": 4}


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("state", ["idle", "stopped", "c", "fork", "thread", "load"])
def test_a_killed_supervisor_leaves_nobody(state: str, method: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    took = [kill_one(state, method, tmp_path / f"stderr{turn}") for turn in range(ROUNDS[method])]
    with capfd.disabled():
        os.write(1, f"\n{figures(f'supervisor killed, {state}, {method}', took)}\n".encode())


def kill_one(state: str, method: str, stderr: Path) -> float:
    """Seconds from the kill until everybody is gone."""
    with Program("to_be_killed", state, method, stderr=stderr) as program:
        # In any order: the program itself, and a line of each worker that has begun a call.
        lines = sorted(program.line() for _ in range(3 if state == "c" else 1))
        assert [line.split()[0] for line in lines] == ["calls"] * (len(lines) - 1) + ["ready"], program.stderr
        fork = json.loads(lines[-1].removeprefix("ready "))["fork"]
        with Watch(set(program.descendants()) - {fork}) as everybody, Watch([fork] if fork else []) as alive:
            assert len(everybody) == (3 if method == "forkserver" else 2)
            if state == "stopped":
                stop(program)
            began = time.perf_counter()
            program.process.kill()
            left = everybody.wait_gone(HARD)
            took = time.perf_counter() - began
            if fork:
                assert alive.wait_gone(0) == [fork], "this test is about a fork that lives"
                alive.kill()
                assert alive.wait_gone(HARD) == []
            everybody.kill()
            assert left == []
            assert program.end() == -signal.SIGKILL
        assert "Traceback" not in program.stderr
    return took


def stop(program: Program) -> None:
    """The workers, and their fork server too."""
    for pid in program.descendants():
        os.kill(pid, signal.SIGSTOP)
    for pid in program.descendants():
        wait_stopped(pid)
