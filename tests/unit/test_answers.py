"""A function in a worker is unpickled once, however many threads begin a call of it at once; where that fails, by each of them."""

import threading
from typing import Any

import pytest

from percore._messages import Kind
from percore._worker.answers import Answers, Function


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
        self.function = Function(Kind.THREAD, b"")
        self.second_is_there = threading.Event()
        self.function.loading = Lock(self.second_is_there)  # type: ignore[assignment]
        self.leases: Any = self
        self.outgoing: Any = self
        self.answers = Answers(self, main_by_value=False)  # type: ignore[arg-type]
        self.fails = fails
        self.loads = 0
        self.got: list[object] = []
        self.second = threading.Thread(target=self.ask)

    def receive(self, _payload: object) -> "Pickled":
        return self

    def load(self) -> object:
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
