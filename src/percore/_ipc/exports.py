"""Views of memory that tell when the last one of them has gone.

What unpickles a buffer keeps no view that it is given, but what that is a view of: neither the death of a view nor its `release`
says anything. So views are made of an object that exports the memory, and dies after everything that looks at it.
"""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from pickle import PickleBuffer
from typing import Any, Final
from weakref import ref

Ended = Callable[[], None]


def parts_of(exported: memoryview, places: Sequence[tuple[int, int]], *, readonly: bool = False) -> list[memoryview]:
    """Views of these places of what `export` has given, or of bytes. Each may be used in another thread: see `Memory.part`."""
    views = [PickleBuffer(exported.obj).raw()[start:end] for start, end in places]
    return [view.toreadonly() for view in views] if readonly else views


class Endings:
    """Calls in the loop what finalisers ask for: they run in any thread, in the midst of anything, and do nothing themselves."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """For the thread of `loop`, in which it is made."""
        self._loop = loop
        self._thread = threading.get_ident()
        self._ended: deque[Ended] = deque()
        self._is_due = False

    def add(self, ended: Ended) -> None:
        """Have `ended` called by the loop; never once that is closed."""
        self._ended.append(ended)
        if self._is_due:
            return
        self._is_due = True
        with contextlib.suppress(RuntimeError):  # it is closed: nobody is left to be told
            if threading.get_ident() == self._thread:
                self._loop.call_soon(self._run)
            else:
                self._loop.call_soon_threadsafe(self._run)

    def _run(self) -> None:
        self._is_due = False
        while self._ended:
            self._ended.popleft()()


_watched: Final[dict[int, ref[Any]]] = {}


@lru_cache(16)
def _array_of(size: int) -> Any:
    import ctypes  # seldom needed, and not cheap to import

    return ctypes.c_char * size  # a class, which takes longer to make than to use: of slots, there is one in a runner


def export(view: memoryview, endings: Endings, ended: Ended) -> memoryview:
    """A view of the same writable memory; `ended` is called when nothing that was made of it is left.

    By way of ctypes: an object of our own with `__buffer__` (3.12) exports from a view that may be collected with it, which ends
    the process where that is cleared first (gh-77894, up to 3.12.6 and 3.13.0).
    """

    def gone(watch: ref[Any]) -> None:
        _watched.pop(id(watch), None)
        endings.add(ended)

    array = _array_of(len(view)).from_buffer(view)
    watch = ref(array, gone)
    _watched[id(watch)] = watch  # by its number: a reference is as hashable as what it refers to
    return PickleBuffer(array).raw()  # of plain bytes, where a view of the array would be one of characters
