"""What a worker is told of multiprocessing in this program. `_worker.siblings` says why."""

import sys
from typing import Any


def authkey() -> bytes:
    """The authentication key of this process; empty where multiprocessing is not loaded."""
    process: Any = sys.modules.get("multiprocessing.process")
    return b"" if process is None else bytes(process.current_process().authkey)


def tracker() -> int | None:
    """The descriptor of this program's resource tracker. None: it has none, and has not imported shared memory either.

    A program that has imported shared memory gets its tracker now, unless it has one: a worker may be the first to make some.

    Raises:
        OSError: it cannot be started.
    """
    module: Any = sys.modules.get("multiprocessing.resource_tracker")
    if module is None:
        return None
    if "multiprocessing.shared_memory" not in sys.modules and module._resource_tracker._fd is None:
        return None
    fd: int = module.getfd()
    return fd
