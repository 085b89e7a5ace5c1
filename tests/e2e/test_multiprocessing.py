"""multiprocessing's objects as arguments: what a worker has merely been given is the program's."""

from pathlib import Path

import pytest

from percore._common.system import default_start_method
from tests.e2e.scripts import output_of

METHODS = ["forkserver", "spawn"] if default_start_method() == "forkserver" else ["spawn"]

_SHARED_MEMORY = """
import asyncio, sys
import multiprocessing.shared_memory
import percore
from multiprocessing.shared_memory import SharedMemory

def by_name(name):
    memory = SharedMemory(name)
    memory.buf[0] += 1
    memory.close()

def given(memory):
    memory.buf[0] += 1
    memory.close()

def made():
    memory = SharedMemory(create=True, size=10)
    memory.buf[0] = 42
    memory.close()
    return memory.name

async def main(method):
    ours = SharedMemory(create=True, size=10)
    try:
        async with percore.Runner(1, start_method=method) as runner:
            await runner.run(by_name, ours.name)
            await runner.run(given, ours)
            name = await runner.run(made)
        again = SharedMemory(ours.name)  # the worker is gone
        theirs = SharedMemory(name)
        print(method, again.buf[0], theirs.buf[0])
        again.close()
        theirs.close()
        theirs.unlink()
    finally:
        ours.close()
        ours.unlink()

if __name__ == "__main__":
    for method in sys.argv[1:]:
        asyncio.run(main(method))
"""


def test_shared_memory_outlives_the_workers_that_attach_and_make_it(tmp_path: Path) -> None:
    assert output_of(_SHARED_MEMORY, tmp_path, *METHODS) == "".join(f"{method} 2 42\n" for method in METHODS)


_SHARED_MEMORY_OF_AN_EXECUTOR = """
import multiprocessing, sys
import percore
from multiprocessing.shared_memory import SharedMemory

def by_name(name):
    memory = SharedMemory(name)
    memory.buf[0] += 1
    memory.close()

if __name__ == "__main__":
    for method in sys.argv[1:]:
        context = multiprocessing.get_context(method) if method != "own" else None
        with percore.LoopPoolExecutor(1, context) as executor:
            ours = SharedMemory(create=True, size=10)
            executor.submit(by_name, ours.name).result()
        again = SharedMemory(ours.name)
        print(method, again.buf[0])
        again.close()
        ours.close()
        ours.unlink()
"""


def test_shared_memory_outlives_the_workers_of_an_executor(tmp_path: Path) -> None:
    assert output_of(_SHARED_MEMORY_OF_AN_EXECUTOR, tmp_path, "own", "fork", "spawn") == "own 1\nfork 1\nspawn 1\n"


_IMPORTED_LATE = """
import asyncio, logging, sys
import percore

def by_name(name):
    from multiprocessing.shared_memory import SharedMemory
    memory = SharedMemory(name)
    memory.buf[0] += 1
    memory.close()

async def main(method):
    logging.getLogger("percore").addHandler(logging.StreamHandler(sys.stdout))
    async with percore.Runner(1, start_method=method) as runner:
        from multiprocessing.shared_memory import SharedMemory
        ours = SharedMemory(create=True, size=10)
        await runner.run(by_name, ours.name)
    again = SharedMemory(ours.name)
    print(again.buf[0])
    again.close()
    ours.close()
    ours.unlink()

if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("method", METHODS)
def test_shared_memory_imported_after_the_start_is_not_tracked_and_that_is_told(method: str, tmp_path: Path) -> None:
    warning, value = output_of(_IMPORTED_LATE, tmp_path, method).splitlines()
    assert "Import multiprocessing.shared_memory in the program before the runner is started" in warning
    assert value == "1"


_MANAGER = """
import asyncio, sys
import percore
from multiprocessing.managers import SyncManager

def fill(proxy, value):
    proxy.append(value)
    return len(proxy)

async def main(method):
    with SyncManager() as manager:
        numbers = manager.list()
        async with percore.Runner(1, start_method=method) as runner:
            print(method, await runner.run(fill, numbers, 7), list(numbers))

if __name__ == "__main__":
    for method in sys.argv[1:]:
        asyncio.run(main(method))
"""


def test_proxies_of_a_manager_work_in_workers(tmp_path: Path) -> None:
    assert output_of(_MANAGER, tmp_path, *METHODS) == "".join(f"{method} 1 [7]\n" for method in METHODS)


_HELD_BACK = """
import asyncio, sys
import percore

def modules():
    return [name for name in sys.modules if name.startswith("multiprocessing")]

def places():
    import multiprocessing.process, inspect
    loader = multiprocessing.process.__spec__.loader
    return type(loader).__name__, loader is multiprocessing.process.__loader__, "def " in inspect.getsource(multiprocessing.process)

async def main():
    async with percore.Runner(1) as runner:
        print(await runner.run(modules), await runner.run(places))

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_worker_imports_multiprocessing_only_with_the_users_code(tmp_path: Path) -> None:
    assert output_of(_HELD_BACK, tmp_path) == "[] ('SourceFileLoader', True, True)\n"


_CONNECTIONS = """
import asyncio, os, socket, sys
import multiprocessing
import percore

def answer(connection):
    connection.send(connection.recv() + 1)
    return os.getpid()

async def answer_in_a_task(pair):
    return answer(*pair)

def shout(sock):
    with sock:
        sock.sendall(b"hello")

async def main(method):
    print(method)
    async with percore.Runner(1, start_method=method) as runner:
        for fn in (answer, answer_in_a_task, lambda end: answer(end)):
            ours, theirs = multiprocessing.Pipe()
            with ours, theirs:
                ours.send(41)
                assert await runner.run(fn, (theirs,) if fn is answer_in_a_task else theirs) != os.getpid()
                print(ours.recv())
        ours, theirs = socket.socketpair()
        with ours, theirs:
            await runner.run(shout, theirs)
            print(ours.recv(10))
        print(await runner.run(len, "the worker is well"))

if __name__ == "__main__":
    for method in sys.argv[1:]:
        asyncio.run(main(method))
"""


def test_connections_and_sockets_are_sent_as_multiprocessing_sends_them(tmp_path: Path) -> None:
    expected = "42\n42\n42\nb'hello'\n18\n"
    assert output_of(_CONNECTIONS, tmp_path, *METHODS) == "".join(f"{method}\n{expected}" for method in METHODS)


_REGISTERED = """
import asyncio
import threading
from multiprocessing.reduction import ForkingPickler
import percore

class Locked:
    def __init__(self, value):
        self.value = value
        self.lock = threading.Lock()

def value_of(locked):
    with locked.lock:
        return locked.value

async def main():
    async with percore.Runner(1) as runner:
        ForkingPickler.register(Locked, lambda locked: (Locked, (locked.value,)))
        print(await runner.run(value_of, Locked(3)))

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_what_is_registered_with_multiprocessing_is_honoured(tmp_path: Path) -> None:
    assert output_of(_REGISTERED, tmp_path) == "3\n"


_REFUSED = """
import asyncio, multiprocessing
from multiprocessing import sharedctypes
import percore

def connect():
    return multiprocessing.Pipe()

def number(value):
    return value.value

async def main():
    async with percore.Runner(1) as runner:
        import ctypes
        print(await runner.run(number, ctypes.c_int(5)))
        for shared in (sharedctypes.RawValue("i", 5), sharedctypes.RawArray("i", 5)):
            try:
                await runner.run(number, shared)
            except TypeError as error:
                print("refused" if "initargs" in str(error) else error)
        print(await runner.run(number, ctypes.c_int(6)))
        try:
            await runner.run(connect)
        except percore.RemoteError as error:
            print("refused" if "give one to the call as an argument" in str(error) else error)
        print(await runner.run(len, "the worker is well"))

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_what_would_arrive_as_a_copy_or_as_a_number_is_refused(tmp_path: Path) -> None:
    assert output_of(_REFUSED, tmp_path) == "5\nrefused\nrefused\n6\nrefused\n18\n"


_GUARDS = """
import asyncio, multiprocessing, os, sys
from concurrent.futures import ProcessPoolExecutor
import percore

def guard():
    parent = multiprocessing.parent_process()
    return (
        multiprocessing.current_process().name.rpartition("-")[2], multiprocessing.current_process()._identity,
        None if parent is None else (parent.pid == int(sys.argv[2]), parent.name, parent.is_alive()),
    )

def nested():
    with percore.LoopPoolExecutor(1) as executor:
        return executor.submit(name).result()

def name():
    return multiprocessing.current_process().name

def child(queue):
    queue.put((multiprocessing.current_process().name, multiprocessing.parent_process().name))

def children():
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    process.join()
    return queue.get()

async def main(method):
    sys.argv[2:] = [str(os.getpid())]
    async with percore.Runner(1, start_method=method) as runner:
        print(await runner.run(guard))
        print(await runner.run(children))
    with percore.LoopPoolExecutor(1) as executor:
        print(executor.submit(nested).result())
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
        print(executor.submit(guard).result())

if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_is_a_child_of_the_program_to_multiprocessing(method: str, tmp_path: Path) -> None:
    guard, child, nested, control = output_of(_GUARDS, tmp_path, method).splitlines()
    assert guard == control == "('1', (1,), (True, 'MainProcess', True))"
    assert child == "('ForkProcess-1:1', 'PercoreProcess-1')"
    assert nested == "PercoreProcess-1:1"


_NESTED_INITARGS = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import sharedctypes
import percore

class Sink:  # as the handlers of loguru with enqueue=True
    def __init__(self):
        self.parts = {"queue": multiprocessing.SimpleQueue(), "lock": multiprocessing.Lock()}
        self.numbers = [multiprocessing.Array("i", 3), sharedctypes.RawArray("i", 3)]
        self.format = lambda value: f"<{value}>"

    def __getstate__(self):
        return {**self.__dict__, "format": None}

    def write(self, value):
        with self.parts["lock"]:
            for numbers in self.numbers:
                numbers[0] += value
            self.parts["queue"].put(value)

def setup(sink):
    global there
    there = sink

def write(value):
    there.write(value)

if __name__ == "__main__":
    sink = Sink()
    with percore.LoopPoolExecutor(1, initializer=setup, initargs=(sink,)) as executor:
        list(executor.map(write, [1, 2]))
    print(sorted(sink.parts["queue"].get() for _ in range(2)), [numbers[0] for numbers in sink.numbers])
    with percore.LoopPoolExecutor(1, initializer=setup, initargs=([1, {2: lambda: 3}],)) as executor:
        assert executor._mp_context is None
        assert executor.submit(abs, -1).result() == 1
"""


def test_initargs_may_contain_what_only_processes_of_multiprocessing_inherit(tmp_path: Path) -> None:
    assert output_of(_NESTED_INITARGS, tmp_path) == "[1, 2] [3, 3]\n"
