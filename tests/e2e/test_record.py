"""`percore record` beside a program that was not prepared for it."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from percore._common.system import HAS_MEMFD
from percore._record.outside import find_py_spy
from tests.watching import pids, running

pytestmark = pytest.mark.skipif(not HAS_MEMFD, reason="pages are memfds")
NEEDS_SAMPLING = pytest.mark.skipif(sys.version_info < (3, 15), reason="profiling.sampling comes with Python 3.15")
NEEDS_PY_SPY = pytest.mark.skipif(find_py_spy() is None, reason="py-spy is not installed")


@pytest.fixture(scope="module")
def program() -> Iterator[int]:
    with running() as pid:
        yield pid


def run(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "percore", "record", *map(str, arguments)]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)


def profiles(path: Path) -> dict[str, set[tuple[str, ...]]]:
    """The stacks of each worker."""
    data: dict[str, Any] = json.loads(path.read_text())
    names = [frame["name"] for frame in data["shared"]["frames"]]
    return {one["name"]: {tuple(names[at] for at in stack) for stack in one["samples"]} for one in data["profiles"]}


@pytest.mark.parametrize(
    "sampler",
    ["faulthandler", pytest.param("py-spy", marks=NEEDS_PY_SPY), pytest.param("profiling.sampling", marks=NEEDS_SAMPLING)],
)
def test_a_blocking_and_an_awaiting_function_are_found(program: int, tmp_path: Path, sampler: str) -> None:
    out = tmp_path / "out.json"
    before = pids(program)
    done = run(program, "-o", out, "--seconds", "1", "--sampler", sampler)
    if sampler != "faulthandler" and f"{sampler} cannot sample" in done.stderr:
        pytest.skip(done.stderr)  # this system lets no process read another one's memory
    assert (done.returncode, done.stderr) == (0, "")
    assert f"by {sampler}" in done.stdout
    found = profiles(out)
    assert any(stack[0] == "__main__.block" for stacks in found.values() for stack in stacks)
    assert any(stack == ("__main__.fetch", "(awaiting)") for stacks in found.values() for stack in stacks)
    assert not any("_worker_process" in frame for stacks in found.values() for stack in stacks for frame in stack)
    assert pids(program) == before


@NEEDS_PY_SPY
def test_threads_are_sampled_from_outside_alone(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with running("threads") as pid:
        refused = run(pid, "-o", out, "--sampler", "faulthandler")
        assert (refused.returncode, refused.stdout, out.exists()) == (1, "", False)
        assert "are threads, which percore record cannot ask" in refused.stderr
        awaiting = False
        while not awaiting:  # the page may always have been written when no worker had something to await
            done = run(pid, "-o", out, "--seconds", "1", "--sampler", "py-spy")
            if "py-spy cannot sample" in done.stderr:
                pytest.skip(done.stderr)  # no process may read another one's memory, or py-spy does not know this Python
            assert (done.returncode, done.stderr) == (0, "")
            found = profiles(out)
            awaiting = any(stack == ("__main__.fetch", "(awaiting)") for stacks in found.values() for stack in stacks)
    assert set(found) <= {"worker 0", "worker 1"}
    assert sum(any(stack[0] == "__main__.compute" for stack in stacks) for stacks in found.values()) == 1


def test_a_page_is_written(program: int, tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    assert run(program, "-o", out, "--seconds", "0.5", "--sampler", "faulthandler").returncode == 0
    assert "__main__.block" in out.read_text()
    assert re.search(r"call \d+, begun [\d.]+ s before", out.read_text())  # the one that blocks


def test_nothing_of_the_recording_stays_in_the_program(program: int, tmp_path: Path) -> None:
    assert run(program, "-o", tmp_path / "out.json", "--seconds", "0.5", "--sampler", "faulthandler").returncode == 0
    worker = next(pid for pid in pids(program) if pid is not None)
    files = [entry for entry in Path(f"/proc/{worker}/fd").iterdir() if "percore-stacks" in os.readlink(entry)]
    assert {file.stat().st_blocks for file in files} == {0}
    stacks = subprocess.run([sys.executable, "-c", STACKS, str(worker)], capture_output=True, text=True, check=True).stdout
    assert "most recent call first" in stacks  # they are found behind the hole


STACKS = "import sys; from percore._attach.stacks import stacks_of; print(stacks_of(int(sys.argv[1])))"


def test_what_cannot_be_recorded_is_told(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = run(os.getpid(), "-o", out)
    assert done.returncode == 1
    assert "percore top lists those that can" in done.stderr
    assert "ends with .html" in run(os.getpid(), "-o", tmp_path / "out.txt").stderr
    assert "cannot be written" in run(os.getpid(), "-o", tmp_path / "no" / "out.json").stderr
    assert "from 1 to 1000" in run(os.getpid(), "-o", out, "--rate", "0").stderr
    none = run(os.getpid(), "-o", out, "--sampler", "py-spy", PATH="")
    assert none.returncode == 1
    assert not out.exists()
