"""A function in a worker is unpickled once, however many threads begin a call of it at once; where that fails, by each of them.

The end of a lease is told after its beginning, whichever of thread and loop is quicker.
"""

import asyncio
import sys
import threading
from pickle import PickleBuffer
from typing import Any

import pytest

from percore._protocol.messages import LEASED, UNLEASED, UNPICKLED, Body, Kind
from percore._serialization.pickler import dump
from percore._transport.memory import Memory
from percore._transport.slots import Sink, SlotReader, SlotWriter
from percore._transport.worker_side import WorkerSide
from percore._worker.answers import Answers, WorkerFunction


class Lock:
    """One that tells when somebody wants it."""

    def __init__(self, wanted: threading.Event) -> None:
        self._lock = threading.RLock()
        self._wanted = wanted

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._wanted.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Pickled:
    """What a function comes out of: while the first thread is at it, a second one asks."""

    is_leased = False

    def __init__(self, *, fails: bool) -> None:
        self.function = WorkerFunction(Kind.THREAD, b"")
        self.second_is_there = threading.Event()
        self.function.loading = Lock(self.second_is_there)  # type: ignore[assignment]
        self.pickler: Any = None
        self.passes = self.pack_values = self.pickler
        self.answers = Answers(self)  # type: ignore[arg-type]
        self.fails = fails
        self.loads = 0
        self.got: list[object] = []
        self.second = threading.Thread(target=self.ask)

    def load(self, *payload: object) -> Any:
        if payload:  # as a channel
            return self
        self.loads += 1
        if threading.current_thread() is self.second:
            self.second_is_there.set()
        else:
            self.second.start()
            self.second_is_there.wait()
        if self.fails:
            raise ValueError("no such thing")
        return len

    def ask(self) -> None:
        try:
            self.got.append(self.answers.function(self.function))
        except ValueError:
            self.got.append(ValueError)


@pytest.mark.parametrize(("fails", "loads", "got"), [(False, 1, len), (True, 2, ValueError)])
def test_a_second_thread_waits_for_what_the_first_unpickles(fails: bool, loads: int, got: object) -> None:
    pickled = Pickled(fails=fails)
    pickled.ask()
    pickled.second.join()
    assert (pickled.loads, pickled.got) == (loads, [got, got])


class Copied:
    """Travels beside a pickle, and is copied when it arrives: no view is left when it is unpickled."""

    def __init__(self, data: bytes | bytearray) -> None:
        self.data = data

    def __reduce_ex__(self, _protocol: Any) -> Any:
        return copied, (PickleBuffer(self.data),)

    def __call__(self) -> int:
        return len(self.data)


def copied(buffer: memoryview) -> Copied:
    return Copied(bytes(buffer))


class Told(WorkerSide):
    """A worker's channel: notes in which order it is told what. Its loop has heard of the lease's end before its thread goes on."""

    def __init__(self, slots: tuple[SlotWriter, SlotReader]) -> None:
        none: Any = None
        super().__init__(asyncio.get_running_loop(), (none, none), none, slots, leases=1)
        self.is_open = True
        self.told: list[int] = []
        self.has_ended = threading.Event()

    def keep(self, op: int, _call_id: int, _body: Body) -> None:
        self.told.append(op)

    def send_lazily(self, op: int, _call_id: int, _body: Body) -> None:
        self.told.append(op)
        self.has_ended.set()

    def send_from_thread(self, op: int, _call_id: int, _body: Body) -> None:
        self.has_ended.wait()
        self.told.append(op)


@pytest.mark.skipif(sys.platform != "linux", reason="nothing is leased elsewhere")
@pytest.mark.parametrize("is_function", [False, True], ids=["arguments", "function"])
async def test_the_end_of_a_lease_is_told_after_its_beginning(*, is_function: bool) -> None:
    size = 1 << 20
    memory = Memory.create(2 * size)
    sink = Sink(SlotWriter(memory, size, size))
    thing = Copied(bytes(100_000))
    dump(thing if is_function else ((thing,), {}), sink, main_by_value=False, beside=sink)
    payload = sink.payload()
    reader = Memory.of_reader(memory.reader_fd(), 2 * size)
    told = Told((SlotWriter(memory, size, size), SlotReader(reader, size)))
    answers = Answers(told)
    function = WorkerFunction(Kind.THREAD, payload)
    function.fn = None if is_function else len
    if is_function:
        assert (await asyncio.to_thread(answers.function, function))() == 100_000
        await asyncio.to_thread(told.has_ended.wait)
    else:
        _, (got,), _, _ = await asyncio.to_thread(answers.unpack, 1, function, payload, told.send_from_thread)
        assert got() == 100_000
    assert told.told == ([LEASED, UNLEASED] if is_function else [LEASED, UNLEASED, UNPICKLED])
    for one in (reader, memory):
        one.close()
