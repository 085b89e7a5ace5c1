"""The state of multiprocessing in this program that workers take over. `_worker.siblings` explains why."""

import sys
from typing import Any


def authkey() -> bytes:
    """Return the authentication key of this process. Empty: multiprocessing is not loaded."""
    process: Any = sys.modules.get("multiprocessing.process")
    return b"" if process is None else bytes(process.current_process().authkey)


def tracker() -> int | None:
    """Return the descriptor of this program's resource tracker. None: there is none, and shared memory is not imported either.

    If the program has imported `multiprocessing.shared_memory`, this starts the tracker unless it runs already: a worker may be the
    first process to create shared memory.

    Raises:
        OSError: the tracker cannot be started.
    """
    module: Any = sys.modules.get("multiprocessing.resource_tracker")
    if module is None:
        return None
    if "multiprocessing.shared_memory" not in sys.modules and module._resource_tracker._fd is None:
        return None
    fd: int = module.getfd()
    return fd
