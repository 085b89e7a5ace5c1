"""The check that runs after every test must itself see what is left."""

import asyncio
import contextlib
import gc
import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests import leaks

SLEEPER = "import signal; signal.pause()"
has_shm = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memfd")
def test_a_mapping_outlives_its_memfd() -> None:
    before = leaks.snapshot()
    fd = os.memfd_create("left-by-a-test")
    os.truncate(fd, mmap.PAGESIZE)
    assert any("file descriptor" in sentence and "left-by-a-test" in sentence for sentence in leaks.since(before))
    with mmap.mmap(fd, mmap.PAGESIZE):
        os.close(fd)
        assert any(sentence.startswith("mapping ") and "left-by-a-test" in sentence for sentence in leaks.since(before))
    assert leaks.since(before) == []


def test_a_descriptor_that_took_the_number_of_another() -> None:
    one, other = socket.socketpair()
    with one, other:
        before = leaks.snapshot()
        number = one.fileno()
        one.close()
        reader, writer = os.pipe()
        assert number in {reader, writer}
        assert len(leaks.since(before)) == 2
        os.close(reader)
        os.close(writer)
        assert leaks.since(before) == []


def test_a_descriptor_held_by_garbage_is_no_leak() -> None:
    before = leaks.snapshot()
    gc.disable()
    try:
        cycle: list[object] = [os.fdopen(os.dup(2), "wb", closefd=False)]
        cycle.append(cycle)
        os.close(cycle[0].fileno())  # type: ignore[attr-defined]
        del cycle
    finally:
        gc.enable()
    assert leaks.since(before) == []


def test_a_thread() -> None:
    before = leaks.snapshot()
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="left-by-a-test")
    thread.start()
    assert list(leaks.since(before)) == ["thread left-by-a-test"]
    end.set()
    thread.join()
    assert leaks.since(before) == []


def test_a_child_is_named_and_killed() -> None:
    running, run = os.pipe()
    before = leaks.snapshot()
    child = subprocess.Popen([sys.executable, "-c", f"import os; os.write({run}, b'.'); {SLEEPER}"], pass_fds=[run])
    os.read(running, 1)  # Popen comes back in the midst of exec, when there may be no command line yet
    (sentence,) = leaks.since(before)
    os.close(running)
    os.close(run)
    assert sentence.startswith(f"process {child.pid} ")
    assert SLEEPER in sentence
    child.wait()
    assert leaks.since(before) == []


def test_a_child_nobody_waited_for() -> None:
    before = leaks.snapshot()
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and still a zombie
    (sentence,) = leaks.since(before)
    assert sentence.startswith(f"process {child.pid} zombie")
    child.wait()


def test_an_orphan_is_found_by_its_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "ORPHAN_PATIENCE", 0.2)
    before = leaks.snapshot()
    # The kernel shows the mark only some time after `Popen` has returned: the child itself tells that it runs.
    child = f"s.Popen([sys.executable, '-c', {'print(flush=True); ' + SLEEPER!r}], stdout=s.PIPE)"
    code = f"import subprocess as s, sys; child = {child}; child.stdout.readline(); print(child.pid, flush=True)"
    answer = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, start_new_session=True)
    (sentence,) = leaks.since(before)
    assert sentence.startswith(f"orphaned process {int(answer.stdout)} ")
    assert leaks.since(before) == []


@has_shm
@pytest.mark.parametrize("is_mapped", [True, False], ids=["mapped", "open"])
def test_a_name_in_shared_memory_that_the_test_holds(is_mapped: bool, shm_name: Path) -> None:
    before = leaks.snapshot()
    with shm_name.open("w+b") as file:
        file.truncate(mmap.PAGESIZE)
        mapping = mmap.mmap(file.fileno(), mmap.PAGESIZE) if is_mapped else None
        if is_mapped:
            file.close()
        assert str(shm_name) in leaks.since(before)
        if mapping is not None:
            mapping.close()
    shm_name.unlink()
    assert leaks.since(before) == []


HOLDER = """
import mmap, os, sys
with open(sys.argv[1], "w+b") as file:
    file.truncate(mmap.PAGESIZE)
    mapping = mmap.mmap(file.fileno(), mmap.PAGESIZE)
if sys.argv[2] == "lets go":
    mapping.close()
print("ready", flush=True)
os.read(0, 1)
"""


@has_shm
def test_a_name_in_shared_memory_that_a_child_holds(shm_name: Path) -> None:
    before = leaks.snapshot()
    with _holder(shm_name, "keeps", os.environ) as child:
        assert leaks.names_held([child.pid]) == [shm_name]
        assert str(shm_name) in leaks.since(before)  # which kills the child


@has_shm
@pytest.mark.parametrize("does", ["keeps", "lets go"])
def test_a_name_in_shared_memory_of_another_program_is_no_leak(does: str, shm_name: Path) -> None:
    before = leaks.snapshot()
    # Neither a descendant nor marked: as a program that somebody else has started.
    environment = {name: value for name, value in os.environ.items() if name != leaks.MARK}
    with _holder(shm_name, does, environment, "if os.fork(): os._exit(0)"):
        assert shm_name.exists()
        assert [sentence for sentence in leaks.since(before) if "/dev/shm/" in sentence] == []


@contextlib.contextmanager
def _holder(name: Path, does: str, environment: Mapping[str, str], first: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """A process that has made the name; it ends when its standard input is closed."""
    code = f"import os\n{first}\n{HOLDER}"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(name), does], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.stdout.read() == b""


@pytest.fixture
def shm_name() -> Iterator[Path]:
    path = Path(f"/dev/shm/left-by-a-test-{os.getpid()}")
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.both_loops
async def test_both_loops_are_asked_for(request: pytest.FixtureRequest) -> None:
    module = type(asyncio.get_running_loop()).__module__
    assert module.partition(".")[0] == request.node.callspec.id
