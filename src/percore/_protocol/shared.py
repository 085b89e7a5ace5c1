"""Shared objects: the handle (`Shared`), and the copy of the object that a process builds on first use (`Copy`).

The handle delegates to a Source: `_calls.shared_objects` implements it for the supervisor, `_worker/shared_objects` for a worker.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from percore._protocol.interfaces import Received

T_co = TypeVar("T_co", covariant=True)


class Source(Protocol[T_co]):
    """The object behind a handle, in one process."""

    def value(self) -> T_co:
        """Return the object."""

    def close(self) -> None:
        """Close the object: no call gets it any more."""

    def travel(self) -> int:
        """Return the object's number, by which the handle is pickled."""

    def left(self) -> None:
        """The handle was garbage collected. This may happen in any thread, between any two operations."""


class Shared(Generic[T_co]):
    """A handle of a read-only object that all workers of a runner share. `await runner.share(obj)` returns it.

    Pass the handle to calls, anywhere inside their arguments, and read its `.value` in them. A pickled handle takes a few bytes.
    The memory is freed after `close()` or after the last reference to the handle is gone, as soon as no call uses the object.
    Closing the runner frees it too.
    """

    __slots__ = ("__weakref__", "_source")

    def __init__(self, source: Source[T_co]) -> None:
        self._source = source

    @property
    def value(self) -> T_co:
        """The object. Do not change it: later calls in the same worker would see the change, and other workers would not.

        The first access in a process unpickles the object; later ones return the same object. Buffers of 64 KiB and more (numpy
        arrays and the like) are read-only and share the same physical pages in all processes. Nothing protects other parts, such
        as a dict: to change one, make a copy first.

        Raises:
            RuntimeError: the object or its runner was closed.
            Exception: any error from unpickling the object.
        """
        return self._source.value()

    def close(self) -> None:
        """Free the object as soon as no call uses it. Calls to which it was already passed can still use it. Idempotent.

        Raises:
            RuntimeError: called in a worker, or from another thread than the runner's.
        """
        self._source.close()

    def __del__(self) -> None:
        source = getattr(self, "_source", None)
        if source is not None:
            source.left()

    def __reduce__(self) -> tuple[Any, ...]:
        return arrive, (self._source.travel(),)

    def __repr__(self) -> str:
        return f"<percore.Shared {self._source}>"


COUNTED: Final = (1 << 32) - 1
"""The bits of a number that count the objects of one process. Those above are random, so two processes never use the same number.

A worker may have a runner of its own, and then handles of both runners arrive there.
"""

sides: Final[list[Callable[[int], Shared[Any] | None]]] = []
"""Functions that look up a handle by number: the supervisor's, and in a worker the worker's. `arrive` tries each."""


def arrive(number: int) -> Shared[Any]:
    """Return the handle for a pickled number. Unpickling a Shared calls this.

    Raises:
        RuntimeError: the object was closed meanwhile, or belongs to another program.
    """
    for side in sides:
        handle = side(number)
        if handle is not None:
            return handle
    raise RuntimeError("the shared object was closed, or belongs to another program")


CLOSED: Final = "the shared object was closed"

_of_thread: Final = threading.local()
"""`builds`: the copies that this thread is building, the outermost first."""


@contextmanager
def others_may_build() -> Iterator[None]:
    """Let other threads build what this one is building, since it waits for a call.

    1. A thread unpickles a shared object, whose code makes a call and waits for it.  2. The loop wants the same object. If it
    waited for the thread, nobody would bring the answer.
    """
    builds: list[Copy] = list(getattr(_of_thread, "builds", ()))
    for copy in reversed(builds):
        copy.building.release()
    try:
        yield
    finally:
        for copy in builds:
            copy.building.acquire()


class Copy:
    """The object behind a handle, in this process. It is built on first use, over memory that all processes read."""

    def __init__(self, load: "Callable[[int, Callable[[], None]], Received]", payload: int, forgotten: Callable[[], None]) -> None:
        """`load` is `Store.load`.

        `forgotten` is called once, in the loop, after `forget` and when no view of the payload is left.
        """
        self._load = load
        self._payload = payload
        self._forgotten = forgotten
        self.building = threading.RLock()
        self._state = threading.RLock()  # guards the next two attributes; re-entrant, as a garbage collection may ask for the value
        self._views = 0
        self._is_given_up = False
        self._value: Any = None
        self._is_built = False

    def value(self) -> Any:
        """Return the object, and build it on the first call. Other threads that call this meanwhile wait.

        A thread that is building it may wait for a call. Then others build it as well, and all of them get what is ready first.

        Raises:
            RuntimeError: the object was given up.
            BaseException: any exception that unpickling raises. The next call tries again.
        """
        if not self._is_built:
            with self.building:
                if not self._is_built:
                    return self._build()
        value = self._value
        if self._is_given_up:  # checked after the value was read, because `forget` may have cleared it
            raise RuntimeError(CLOSED)
        return value

    def _build(self) -> Any:
        with self._state:
            if self._is_given_up:
                raise RuntimeError(CLOSED)
            self._views += 1
        builds: list[Copy] = _of_thread.__dict__.setdefault("builds", [])
        builds.append(self)
        try:
            value = self._load(self._payload, self._gone).load()
        finally:
            builds.pop()
        with self._state:
            if self._is_given_up:
                return value
            if not self._is_built:
                self._value, self._is_built = value, True
            return self._value

    def forget(self) -> None:
        """Give the object up: `value` raises from now on. Objects already returned stay valid. Call this once, in the loop."""
        with self._state:
            self._is_given_up = True
            is_seen = bool(self._views)
        self._value = None
        if not is_seen:
            self._forgotten()

    def _gone(self) -> None:
        with self._state:
            self._views -= 1
            is_over = self._is_given_up and not self._views
        if is_over:
            self._forgotten()
