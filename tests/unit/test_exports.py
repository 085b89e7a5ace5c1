"""A view of memory tells when the last that was made of it has gone, from wherever that goes, and then in the loop."""

import asyncio
import ctypes
import gc
import mmap
import pickle
import threading
from collections.abc import Callable, Iterator
from pickle import PickleBuffer
from types import SimpleNamespace
from typing import Any

import pytest

from percore._common import endings as module
from percore._common.endings import Endings
from percore._transport.leases import export

SIZE = 4 * mmap.PAGESIZE

pytestmark = pytest.mark.both_loops


class Told:
    """Counts its calls, and where they came from."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    def __call__(self) -> None:
        self.threads.append(threading.get_ident())

    @property
    def count(self) -> int:
        return len(self.threads)


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    memory = mmap.mmap(-1, SIZE)
    yield memory
    memory.close()  # fails while anything looks at it


async def turns() -> None:
    """Turns of the loop: what it was told from here is done."""
    for _ in range(3):
        await asyncio.sleep(0)


def address(view: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


async def test_a_view_of_it_is_the_memory_itself_and_can_be_written(memory: mmap.mmap) -> None:
    view = export(memoryview(memory)[100:200], Endings(asyncio.get_running_loop()), Told())
    assert (view.nbytes, view.format, view.itemsize, view.ndim, view.readonly) == (100, "B", 1, 1, False)
    assert address(view) == address(memory) + 100
    view[:5] = b"hello"
    assert memory[100:105] == b"hello"
    with pytest.raises(TypeError):
        view.toreadonly()[0] = 1
    del view


DERIVED: list[Callable[[memoryview], Any]] = [
    lambda view: view,
    lambda view: view[10:20],
    lambda view: view[10:20].toreadonly(),
    lambda view: view.cast("Q")[1:][1:],
    lambda view: PickleBuffer(view[1:]),
    lambda view: memoryview(PickleBuffer(view)),
    lambda view: (ctypes.c_char * 8).from_buffer(view),
    lambda view: pickle.loads(pickle.dumps(PickleBuffer(view), 5, buffer_callback=lambda _: False), buffers=[view[5:]]),
    lambda view: {"of": [view[7:], (view[8:],)]},
]


@pytest.mark.parametrize("derive", DERIVED, ids=range(len(DERIVED)))
async def test_it_ends_when_the_last_that_was_made_of_it_has_gone(memory: mmap.mmap, derive: Callable[[memoryview], Any]) -> None:
    told = Told()
    view = export(memoryview(memory), Endings(asyncio.get_running_loop()), told)
    derived = [derive(view), derive(view)]
    del view
    await turns()
    assert told.count == 0
    derived.pop()
    await turns()
    assert told.count == 0
    derived.pop()
    assert told.count == 0, "not in the midst of anything"
    await turns()
    assert told.threads == [threading.get_ident()]


async def test_an_array_keeps_it(memory: mmap.mmap) -> None:
    numpy = pytest.importorskip("numpy")
    told = Told()
    view = export(memoryview(memory), Endings(asyncio.get_running_loop()), told)
    array = numpy.frombuffer(view[: SIZE // 2], numpy.float64)
    view.release()
    del view
    rows = array.reshape(-1, 8)[::2].T
    rows += 1.5
    del array
    gc.collect()
    await turns()
    assert told.count == 0
    assert memory[:8] == numpy.float64(1.5).tobytes()
    del rows
    await turns()
    assert told.count == 1


async def test_a_release_of_one_view_ends_nothing_that_another_looks_at(memory: mmap.mmap) -> None:
    told = Told()
    view = export(memoryview(memory), Endings(asyncio.get_running_loop()), told)
    part = view[5:10]
    view.release()
    await turns()
    assert told.count == 0
    part[:] = b"still"
    assert memory[5:10] == b"still"
    part.release()
    del view, part
    await turns()
    assert told.count == 1


async def test_it_ends_in_the_loop_though_another_thread_lets_go(memory: mmap.mmap) -> None:
    told = Told()
    held = [export(memoryview(memory), Endings(asyncio.get_running_loop()), told)]
    await asyncio.to_thread(held.clear)
    await turns()
    assert told.threads == [threading.get_ident()]


async def test_it_ends_in_the_loop_though_a_collection_lets_go(memory: mmap.mmap) -> None:
    told = Told()
    cycle: list[Any] = [export(memoryview(memory), Endings(asyncio.get_running_loop()), told)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert told.count == 0
    await turns()
    assert told.threads == [threading.get_ident()]


async def test_it_ends_in_the_loop_though_a_collection_in_another_thread_lets_go(memory: mmap.mmap) -> None:
    told = Told()
    cycle: list[Any] = [export(memoryview(memory), Endings(asyncio.get_running_loop()), told)]
    cycle.append(cycle)
    del cycle
    await asyncio.to_thread(gc.collect)
    await turns()
    assert told.threads == [threading.get_ident()]


@pytest.mark.parametrize("in_thread", [False, True], ids=["here", "in a thread"])
@pytest.mark.parametrize("in_cycle", [False, True], ids=["counted", "collected"])
def test_when_the_loop_is_closed_nobody_is_told(in_thread: bool, in_cycle: bool) -> None:
    memory, told = mmap.mmap(-1, SIZE), Told()
    loop = asyncio.new_event_loop()
    endings = Endings(loop)
    held: list[Any] = [export(memoryview(memory), endings, told), export(memoryview(memory), endings, told)]
    loop.close()
    if in_cycle:
        held.append(held)
        drop: Callable[[], object] = gc.collect
        del held
    else:
        drop = held.clear
    if in_thread:
        thread = threading.Thread(target=drop)
        thread.start()
        thread.join()
    else:
        drop()
    assert told.count == 0
    memory.close()


async def test_the_memory_lives_as_long_as_what_looks_at_it() -> None:
    told, memory = Told(), mmap.mmap(-1, SIZE)
    memory[:4] = b"held"
    view = export(memoryview(memory), Endings(asyncio.get_running_loop()), told)[:4]
    with pytest.raises(BufferError):
        memory.close()
    del memory
    gc.collect()
    assert bytes(view) == b"held"
    del view
    await turns()
    assert told.count == 1


async def test_what_ends_while_endings_are_told_is_told_as_well(memory: mmap.mmap) -> None:
    endings, told = Endings(asyncio.get_running_loop()), Told()
    other = [export(memoryview(memory)[8:], endings, told)]
    view = export(memoryview(memory), endings, other.clear)
    del view
    await turns()
    assert other == []
    assert told.count == 1


async def test_an_ending_that_raises_does_not_keep_the_others_waiting() -> None:
    """The loop reports the error; without another ending, nothing else would ask for the rest."""
    loop, told, reported = asyncio.get_running_loop(), Told(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: reported.append(context))
    endings = Endings(loop)

    def broken() -> None:
        raise OSError("on purpose")

    for ended in (broken, told, broken, told):
        endings.add(ended)
    await turns()
    assert told.count == 2
    assert [str(context["exception"]) for context in reported] == ["on purpose"] * 2


@pytest.mark.parametrize("in_loop", [True, False], ids=["in the loop", "outside"])
async def test_an_interrupted_ending_does_not_keep_later_ones_waiting(in_loop: bool) -> None:
    """As by a Ctrl-C just before the loop is asked."""
    asked: list[Callable[[], None]] = []

    def call_soon(callback: Callable[[], None]) -> None:
        if not asked:
            asked.append(callback)
            raise KeyboardInterrupt
        callback()

    loop: Any = SimpleNamespace(call_soon=call_soon, call_soon_threadsafe=call_soon)
    endings, told = Endings(loop), Told()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "_get_running_loop", lambda: loop if in_loop else None)
        with pytest.raises(KeyboardInterrupt):
            endings.add(told)
        endings.add(told)
    assert told.count == 2


def test_an_ending_that_comes_a_second_after_the_loop_was_asked_in_vain_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C that comes just before a callback has the loop drop it."""
    asked: list[Callable[[], None]] = []
    loop: Any = SimpleNamespace(call_soon_threadsafe=asked.append)
    now = 100.0
    monkeypatch.setattr(module, "monotonic", lambda: now)
    endings, told = Endings(loop), Told()
    for _ in range(2):
        endings.add(told)
    assert len(asked) == 1
    now += 1.5
    for _ in range(2):
        endings.add(told)
    assert len(asked) == 2
    asked[-1]()
    assert told.count == 4


def test_the_loop_is_asked_once_for_many() -> None:
    asked: list[Callable[[], None]] = []
    loop: Any = SimpleNamespace(call_soon=asked.append, call_soon_threadsafe=asked.append)
    endings, told = Endings(loop), Told()
    for _ in range(100):
        endings.add(told)
    assert len(asked) == 1
    asked.pop()()
    assert told.count == 100
    endings.add(told)
    assert len(asked) == 1


async def test_the_loop_hears_of_an_ending_from_the_thread_that_made_the_memory() -> None:
    """As in a worker whose main thread maps the memory and runs functions, while its loop runs in another thread."""
    loop, told = asyncio.get_running_loop(), Told()
    loop.set_debug(True)  # a callback from another thread is refused then, unless it wakes the loop
    await asyncio.to_thread(lambda: Endings(loop).add(told))
    await turns()
    assert told.count == 1


async def test_none_of_many_threads_endings_is_lost() -> None:
    endings, told = Endings(asyncio.get_running_loop()), Told()
    memory = mmap.mmap(-1, SIZE)

    def export_and_drop() -> None:
        for _ in range(500):
            export(memoryview(memory), endings, told)

    await asyncio.gather(*(asyncio.to_thread(export_and_drop) for _ in range(4)))
    await turns()
    assert told.count == 2000
    memory.close()
