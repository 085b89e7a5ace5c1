"""Views of memory that tell when the last one of them has gone.

What unpickles a buffer keeps no view that it is given, but what that is a view of: neither the death of a view nor its `release`
says anything. So views are made of an object that exports the memory, and dies after everything that looks at it.
"""

import asyncio
import contextlib
import sys
import threading
from collections import deque
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any, Final

Ended = Callable[[], None]


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


if sys.version_info >= (3, 12):

    class _Exporter:
        __slots__ = ("_ended", "_endings", "_view")

        def __init__(self, view: memoryview, endings: Endings, ended: Ended) -> None:
            self._view = view
            self._endings = endings
            self._ended = ended

        def __buffer__(self, flags: int) -> memoryview:
            return self._view

        def __del__(self) -> None:
            self._endings.add(self._ended)

    def export(view: memoryview, endings: Endings, ended: Ended) -> memoryview:
        """A view of the same writable memory; `ended` is called when nothing that was made of it is left."""
        return memoryview(_Exporter(view, endings, ended))

else:
    from weakref import ref

    _watched: Final[dict[int, ref[Any]]] = {}

    def export(view: memoryview, endings: Endings, ended: Ended) -> memoryview:
        """A view of the same writable memory; `ended` is called when nothing that was made of it is left."""
        import ctypes  # seldom needed, and not cheap to import

        def gone(watch: ref[Any]) -> None:
            _watched.pop(id(watch), None)
            endings.add(ended)

        array = (ctypes.c_char * len(view)).from_buffer(view)
        watch = ref(array, gone)
        _watched[id(watch)] = watch  # by its number: a reference is as hashable as what it refers to
        return PickleBuffer(array).raw()  # of plain bytes, where a view of the array would be one of characters
