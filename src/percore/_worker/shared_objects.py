"""Shared objects in a worker: they arrive in arguments, are unpickled when a call asks for the value, and are dropped on FORGET."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NoReturn

from percore._protocol import shared
from percore._protocol.messages import FORGOTTEN
from percore._protocol.shared import Copy, Shared
from percore._worker.context import current

if TYPE_CHECKING:
    from percore._protocol.interfaces import WorkerChannel


_watch: Final = threading.local()
"""`met`: numbers of the shared objects in the nested call that this thread is pickling."""


class Known:
    """A shared object that this worker was told about. It is the `Source` of its handles here."""

    def __init__(self, channel: "WorkerChannel", number: int, payload: int) -> None:
        self._number = number
        self._channel = channel
        self.copy = Copy(channel.load_shared, payload, self._forgotten)

    def _forgotten(self) -> None:
        if self._channel.is_open:
            self._channel.send(FORGOTTEN, self._number, None)

    # As a Source

    def value(self) -> Any:
        return self.copy.value()

    def close(self) -> NoReturn:
        raise RuntimeError("a shared object can be closed only in the program that shared it, not in a worker")

    def travel(self) -> int:
        met = getattr(_watch, "met", None)
        if met is not None:
            met.append(self._number)
        return self._number

    def left(self) -> None:
        """Do nothing: the supervisor decides when the object is dropped."""

    def __str__(self) -> str:
        return f"number {self._number & shared.COUNTED}, in a worker"


class WorkerShares:
    """All shared objects that have arrived in one worker."""

    def __init__(self, channel: "WorkerChannel") -> None:
        self._channel = channel
        self._known: dict[int, Known] = {}

    @contextmanager
    def watch(self) -> Iterator[list[int]]:
        """Collect the numbers of the shared objects that this thread pickles. Pairs may be nested."""
        outer, _watch.met = getattr(_watch, "met", None), []
        try:
            yield _watch.met
        finally:
            _watch.met = outer

    def meet(self, number: int, parcel: int) -> None:
        """Learn of a shared object that later calls refer to. A second time changes nothing. From the loop."""
        if number not in self._known:  # a supervisor that was interrupted as it told this tells it again
            self._known[number] = Known(self._channel, number, parcel)

    def arrive(self, number: int) -> Shared[Any] | None:
        """Return the handle of a shared object while a call that contains it is unpickled. From any thread."""
        known = self._known.get(number)
        return None if known is None else Shared(known)

    def forget(self, number: int, _body: None) -> None:
        """Drop a shared object: no call is left that may use it. From the loop."""
        self._known.pop(number).copy.forget()

    def stop(self) -> None:
        """Drop all shared objects when the worker ends."""
        for number in list(self._known):
            self.forget(number, None)


def _find(number: int) -> Shared[Any] | None:
    context = current()
    return None if context is None or context.shares is None else context.shares.arrive(number)


shared.sides.insert(0, _find)
