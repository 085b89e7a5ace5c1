"""Shared: an object that lies in shared memory once, for all workers. This is the handle; what is behind it differs by side."""

from collections.abc import Callable
from typing import Any, Final, Generic, Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Source(Protocol[T_co]):
    """What a handle stands for, in one process."""

    def value(self) -> T_co:
        """The object."""

    def close(self) -> None:
        """Give it up."""

    def travel(self) -> tuple[int, int]:
        """It is pickled as part of something: its number, and the payload it is in."""

    def left(self) -> None:
        """The handle is no more. From any thread, in the midst of anything."""


class Shared(Generic[T_co]):
    """An object that all workers of a runner share and none may change, made by `await runner.share(obj)`.

    Give it to calls, anywhere inside their arguments, and read `.value` there. It travels as a name of a few bytes. Its memory is
    freed by `close()`, when this handle is dropped here and no call uses it any more, and when the runner is closed.
    """

    __slots__ = ("__weakref__", "_source")

    def __init__(self, source: Source[T_co]) -> None:
        self._source = source

    @property
    def value(self) -> T_co:
        """The object. Do not change it: later calls in the same worker would see the change, and other workers would not.

        Each process builds it once, when a call first asks for it; that takes as long as unpickling. Its buffers (numpy arrays and
        the like of 64 kB and more) lie on the same physical pages in all processes and can only be read. Nothing protects the
        rest, such as a dict: a call that wants to change it makes a copy first.

        Raises:
            RuntimeError: it was closed, or its runner was.
            Exception: whatever unpickling it raises.
        """
        return self._source.value()

    def close(self) -> None:
        """Free it as soon as no call uses it: those that were given it go on. Idempotent.

        Raises:
            RuntimeError: in a worker, or from another thread than the runner's.
        """
        self._source.close()

    def __del__(self) -> None:
        source = getattr(self, "_source", None)
        if source is not None:
            source.left()

    def __reduce__(self) -> tuple[Any, ...]:
        return arrive, self._source.travel()

    def __repr__(self) -> str:
        return f"<percore.Shared {self._source}>"


sides: Final[list[Callable[[int, int], Shared[Any] | None]]] = []
"""Asked in turn for the handle of a number and payload: a worker's side, if this is one, and the supervisor's."""


def arrive(number: int, payload: int) -> Shared[Any]:
    """The handle that has travelled to here.

    Raises:
        RuntimeError: it was closed meanwhile.
    """
    for side in sides:
        handle = side(number, payload)
        if handle is not None:
            return handle
    raise RuntimeError("the shared object was closed, or belongs to another program")
