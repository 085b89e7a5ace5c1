"""The check that runs after every test must itself see what is left."""

import asyncio
import gc
import mmap
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests import leaks

SLEEPER = "import signal; signal.pause()"


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
    child = f"s.Popen([sys.executable, '-c', {SLEEPER!r}], stdout=s.DEVNULL)"
    code = f"import subprocess as s, sys; print({child}.pid, flush=True)"
    answer = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, start_new_session=True)
    (sentence,) = leaks.since(before)
    assert sentence.startswith(f"orphaned process {int(answer.stdout)} ")
    assert leaks.since(before) == []


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")
def test_a_name_in_shared_memory() -> None:
    before = leaks.snapshot()
    path = Path(f"/dev/shm/{leaks.OF_A_TEST}{os.getpid()}")
    path.touch()
    try:
        assert leaks.since(before) == [str(path)]
    finally:
        path.unlink()


@pytest.mark.skipif(sys.platform != "linux", reason="who maps a name is asked of /proc")
def test_a_name_in_shared_memory_of_somebody_else_is_none_of_ours() -> None:
    before = leaks.snapshot()
    path = Path(f"/dev/shm/{leaks.OF_A_TEST}{os.getpid()}")
    # Neither a descendant nor marked: a program that somebody else has started. It ends when it may read no more.
    code = f"""
import mmap, os
if os.fork():
    os._exit(0)
with open({str(path)!r}, "w+b") as file:
    file.truncate(mmap.PAGESIZE)
    mapping = mmap.mmap(file.fileno(), mmap.PAGESIZE)
print("mapped", flush=True)
os.read(0, 1)
os.unlink({str(path)!r})
print("gone", flush=True)
"""
    environment = {name: value for name, value in os.environ.items() if name != leaks.MARK}
    with subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"mapped\n"
        process.wait()
        assert path.exists()
        assert [sentence for sentence in leaks.since(before) if "/dev/shm/" in sentence] == []
        process.stdin.close()
        assert process.stdout.readline() == b"gone\n"


@pytest.mark.both_loops
async def test_both_loops_are_asked_for(request: pytest.FixtureRequest) -> None:
    module = type(asyncio.get_running_loop()).__module__
    assert module.partition(".")[0] == request.node.callspec.id
