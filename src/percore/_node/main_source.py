"""The program's `__main__` on a node that may not have its file."""

import atexit
import os
import shutil
import tempfile
from functools import cache
from typing import Any

from percore._serialization.pickler import MainInfo


def main_here(main: tuple[Any, ...], source: bytes | None) -> MainInfo:
    """Return how workers of this node get the program's `__main__`.

    If that is a script which this node has not, or has otherwise, its source is written into a folder. `remove_source` removes it.

    Raises:
        OSError: the source could not be written.
    """
    info = MainInfo(*main)
    if info.kind != "script" or source is None or _content(info.target) == source:
        return info
    path = os.path.join(_folder(), os.path.basename(info.target))
    with open(path, "wb") as file:
        file.write(source)
    return MainInfo("script", path)


def remove_source() -> None:
    """Remove what `main_here` has written. No worker of this process may need it any more. Idempotent."""
    if _folder.cache_info().currsize:
        shutil.rmtree(_folder(), ignore_errors=True)
        _folder.cache_clear()


def _content(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None


@cache
def _folder() -> str:
    atexit.register(remove_source)  # of a host that shares its process with others
    return tempfile.mkdtemp(prefix="percore-")
