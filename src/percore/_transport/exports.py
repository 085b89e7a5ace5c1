"""Views of memory with a callback for when the last of them is freed.

An array that is unpickled from a view keeps no reference to the view, but one to the object that exports the memory. So neither the
end of the view nor its `release` means that the memory is unused. This module therefore puts an object of its own in between: it
exports the memory, and is freed after everything that refers to it.
"""

from collections.abc import Sequence
from functools import lru_cache
from pickle import PickleBuffer
from typing import Any, Final
from weakref import ref

from percore._common.endings import Ended, Endings


def parts_of(exported: memoryview, places: Sequence[tuple[int, int]], *, readonly: bool = False) -> list[memoryview]:
    """Return views of these places (start, end) of `exported`, which `export` has returned or which is a view of bytes.

    Each view may be used in another thread; `Memory.part` says why that matters.
    """
    views = [PickleBuffer(exported.obj).raw()[start:end] for start, end in places]
    return [view.toreadonly() for view in views] if readonly else views


_watched: Final[dict[int, ref[Any]]] = {}


@lru_cache(16)
def _array_of(size: int) -> Any:
    import ctypes  # seldom needed, and not cheap to import

    return ctypes.c_char * size  # cached, because making the class takes longer than using it; all slots of a runner share one


def export(view: memoryview, endings: Endings, ended: Ended) -> memoryview:
    """Return another view of the writable memory of `view`. The loop calls `ended` when no object refers to it any more.

    A ctypes array exports the memory. A Python class with `__buffer__` (3.12) would keep the view that it exports from, and both
    may be garbage-collected together. If the collector clears the view first, the process crashes (gh-77894, up to 3.12.6 and
    3.13.0).
    """

    def gone(watch: ref[Any]) -> None:
        _watched.pop(id(watch), None)
        endings.add(ended)

    array = _array_of(len(view)).from_buffer(view)
    watch = ref(array, gone)
    _watched[id(watch)] = watch  # keyed by id: a weak reference is hashable only if its object is
    return PickleBuffer(array).raw()  # raw() gives format B; a view of the array itself would have the format of characters
