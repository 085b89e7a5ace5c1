"""The program and `percore record` use the file of the workers' stacks one after the other."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from percore._attach import stacks
from percore._attach.stacks import NoStacks, forget_stacks, stacks_of
from percore._common.system import HAS_MEMFD
from percore._engines.processes import examination
from percore._engines.processes.examination import Examiner
from percore._protocol.interfaces import Condition
from percore._worker_process import own_stacks, stacks_file
from percore._worker_process.boot import ASK_SIGNAL, STACKS_SIGNAL

pytestmark = pytest.mark.skipif(not HAS_MEMFD, reason="the file is a memfd")


class Scene:
    """An examiner, a process that answers it, and this process as the worker that is asked from outside."""

    def __init__(self) -> None:
        self.examiner = Examiner(asyncio.get_running_loop())
        self.asked: list[str] = []

    def kill(self, signum: int) -> None:
        """As a process of a launcher: what it writes is what the handler in a worker does."""
        assert signum == ASK_SIGNAL
        self.write("the blocked one")

    def write(self, text: str) -> None:
        self.asked.append(text)
        os.write(self.examiner.fd, text.encode())

    async def examined(self) -> Condition:
        told: asyncio.Future[Condition] = asyncio.get_running_loop().create_future()
        self.examiner.examine(os.getpid(), cast("Any", self), told.set_result)
        return await told

    def open(self) -> int:
        return os.open(f"/proc/self/fd/{self.examiner.fd}", os.O_RDWR)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    found, loop = Scene(), asyncio.get_running_loop()
    loop.add_signal_handler(ASK_SIGNAL, found.write, "the sampled one")
    loop.add_signal_handler(STACKS_SIGNAL, found.write, "by faulthandler")
    yield found
    for signum in (ASK_SIGNAL, STACKS_SIGNAL):
        loop.remove_signal_handler(signum)
        signal.signal(signum, signal.SIG_DFL)
    found.examiner.close()


async def test_a_sample_waits_for_an_examination(scene: Scene) -> None:
    examined = asyncio.create_task(scene.examined())
    await asyncio.sleep(0)
    assert scene.asked == ["the blocked one"]
    sampled = asyncio.create_task(asyncio.to_thread(stacks_of, os.getpid(), 0.002))
    forgotten = asyncio.create_task(asyncio.to_thread(forget_stacks, os.getpid()))
    assert (await examined).stacks == "the blocked one"
    assert await sampled == "the sampled one"
    await forgotten
    assert scene.asked == ["the blocked one", "the sampled one"]


async def test_an_examination_waits_for_a_sample_and_comes_before_the_next_one(scene: Scene) -> None:
    outside = scene.open()
    assert stacks_file.take_unclaimed(outside)
    examined = asyncio.create_task(scene.examined())
    await asyncio.sleep(0)
    assert scene.asked == []
    stacks_file.release(outside)
    assert not stacks_file.take_unclaimed(outside)
    assert (await examined).stacks == "the blocked one"
    assert stacks_file.take_unclaimed(outside)
    os.close(outside)


async def test_a_recorder_that_is_stopped_keeps_no_report_back(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "_MOST_TRIES", 1)
    outside = scene.open()
    assert stacks_file.take_unclaimed(outside)
    assert (await scene.examined()).stacks == "the blocked one"
    os.close(outside)


async def test_a_recorder_that_is_killed_keeps_nothing(scene: Scene) -> None:
    outside, other = scene.open(), scene.open()
    assert stacks_file.take_unclaimed(outside)
    assert not stacks_file.take_unclaimed(other)
    os.close(outside)
    assert stacks_file.take_unclaimed(other)
    os.close(other)


async def test_faulthandler_is_for_a_worker_that_does_not_answer(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at the frames of threads that run on, and has crashed busy workers."""
    monkeypatch.setattr("percore._attach.stacks._PATIENCE", 0.01)
    asyncio.get_running_loop().remove_signal_handler(ASK_SIGNAL)
    assert await asyncio.to_thread(stacks_of, os.getpid(), 0.002) == "by faulthandler"


async def test_the_next_process_with_the_number_of_a_worker_gets_no_signal(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_PATIENCE", 0.01)
    asyncio.get_running_loop().remove_signal_handler(ASK_SIGNAL)
    find = stacks._file
    found: list[Path] = []

    def find_until_it_ends(pid: int) -> Path:
        if len(found) == 2:  # it was asked once
            raise NoStacks("it has ended")
        found.append(find(pid))
        return found[-1]

    monkeypatch.setattr(stacks, "_file", find_until_it_ends)
    with pytest.raises(NoStacks, match="it has ended"):
        await asyncio.to_thread(stacks_of, os.getpid(), 0.002)
    await asyncio.sleep(0)
    assert scene.asked == []


def test_a_worker_writes_its_stacks_while_somebody_has_the_file() -> None:
    fd = os.memfd_create("stacks")
    (own,) = own_stacks.answer(fd)
    try:
        os.kill(os.getpid(), ASK_SIGNAL)  # a terminal was resized
        assert os.fstat(fd).st_size == 0
        assert stacks_file.take(fd)
        os.kill(os.getpid(), ASK_SIGNAL)
        text = os.pread(fd, 1 << 20, 0).decode()
    finally:
        signal.signal(ASK_SIGNAL, signal.SIG_DFL)
        os.close(own)
        os.close(fd)
    current = text.split("\n\n")[-1].splitlines()
    assert current[0].startswith("Current thread 0x")
    assert current[1].endswith("in test_a_worker_writes_its_stacks_while_somebody_has_the_file")


async def test_stacks_that_another_one_reads_for_long_are_told(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("percore._attach.stacks._LATEST", 0.01)
    outside = scene.open()
    assert stacks_file.take_unclaimed(outside)
    with pytest.raises(NoStacks, match="another one reads the stacks"):
        await asyncio.to_thread(stacks_of, os.getpid())
    os.close(outside)
