"""What another process of the same user, and one of another user, can do to a program and its workers: V10 of the threat model.

The programs run without the capabilities of root, who may do everything.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import attack
from tests.faults import LIMIT

pytestmark = [
    pytest.mark.asyncio_only,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it looks into /proc, and uses prctl"),
]

ROOT = Path(__file__).parents[2]
STRANGER = 65532
IS_ROOT = os.getuid() == 0
WITHOUT_RIGHTS = ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--"] if IS_ROOT else []
"""Root without capabilities is a user like any other: that of most containers."""


def run(*command: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT, check=False, **options)


def python_of_strangers() -> str | None:
    """An interpreter that another user can run: this one may lie in a folder of this user alone."""
    for path in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        with suppress(OSError):
            if not run(path, "-c", "import ctypes", user=STRANGER, group=STRANGER, extra_groups=[]).returncode:
                return path
    return None


@contextmanager
def program(harden: bool) -> Iterator[dict[str, Any]]:
    """Run the program, and yield what it tells."""
    command = [*WITHOUT_RIGHTS, sys.executable, "-m", "tests.e2e.hardened_program", str(int(harden))]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        line = process.stdout.readline()
        yield json.loads(line)
        process.stdin.close()
        assert process.wait(LIMIT) == 0


def attacked(told: dict[str, Any], *python: str, **options: Any) -> dict[str, set[str]]:
    """What a process can do to those of the program, by role."""
    roles = told["roles"]
    done = run(*python, "-", *map(str, roles.values()), input=Path(attack.__file__).read_text(), **options)
    assert not done.stderr
    found = json.loads(done.stdout)
    return {role: set(found[str(pid)]) for role, pid in roles.items()}


def test_v10_a_hardened_program_is_closed_to_its_own_user_and_a_plain_one_to_other_users(subtests: pytest.Subtests) -> None:
    if IS_ROOT and shutil.which("setpriv") is None:
        pytest.skip("root may do everything, and setpriv is not there to take its capabilities")
    with program(harden=True) as told:
        with subtests.test("each process is closed, and gets no further rights"):
            assert not told["before"][1]
            for way in ("spawn", "fork", "executor", "forkserver"):
                assert told[way][1:] == [True, True], way
            assert told["child"] is True
            assert told["program"][1:] == [True, False]
        with subtests.test("its user can do nothing but end it"):
            found = attacked(told, *WITHOUT_RIGHTS, sys.executable)
            assert set(found) == {"supervisor", "fork server", "worker 0", "worker 1"}
            assert set().union(*found.values()) == {"signal"}, found
        with subtests.test("the program itself still sees its workers"):
            assert told["rss"] > 1 << 20
            assert all(size > 1 << 20 for size in told["memory"])
        with subtests.test("percore top and record say why they show nothing"):
            pid = str(told["program"][0])
            for command in (("top", pid, "--once"), ("record", pid, "-o", "/tmp/never.html")):
                done = run(*WITHOUT_RIGHTS, sys.executable, "-m", "percore", *command)
                assert done.returncode == 1
                assert "is closed to all but root, as percore.Runner(harden=True) does" in done.stderr
    with program(harden=False) as told:
        with subtests.test("without it no process is closed"):
            for way in ("spawn", "fork", "executor", "forkserver", "program"):
                assert told[way][1:] == [False, False], way
            assert told["child"] is False
        with subtests.test("its user can do everything, where the system restricts nothing"):
            restricted = Path("/proc/sys/kernel/yama/ptrace_scope")
            if not restricted.exists() or restricted.read_text().strip() == "0":
                found = attacked(told, *WITHOUT_RIGHTS, sys.executable)
                assert all(ways == set(attack.WAYS) for ways in found.values()), found
        with subtests.test("another user can do nothing"):
            if not IS_ROOT:
                pytest.skip("only root can start a program as another user")
            if (python := python_of_strangers()) is None:
                pytest.skip("another user cannot run Python here")
            found = attacked(told, python, user=STRANGER, group=STRANGER, extra_groups=[])
            assert not set().union(*found.values()), found
