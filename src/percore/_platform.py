"""The capabilities of the operating system, checked once at import.

PERCORE_WITHOUT="memfd,eventfd,pidfd,setsig,uvloop" makes percore on Linux behave as on systems that lack these, so that one machine
can test all of the fallbacks. Workers inherit the environment, so both sides of a channel always agree.
"""

import fcntl
import os
import sys

_without = frozenset(filter(None, os.environ.get("PERCORE_WITHOUT", "").replace(" ", "").split(",")))
_known = frozenset({"memfd", "eventfd", "pidfd", "setsig", "uvloop"})

if _without - _known:
    raise ImportError(
        f"PERCORE_WITHOUT={','.join(sorted(_without))} names something unknown; known are: {', '.join(sorted(_known))}"
    )


def _pidfd_works() -> bool:
    # The function may exist and the system may still refuse the call (old kernels: ENOSYS; old container profiles: EPERM).
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def _memfd_works() -> bool:
    try:
        os.close(os.memfd_create("percore", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except (AttributeError, OSError):
        return False
    return True


HAS_MEMFD = "memfd" not in _without and _memfd_works()
HAS_EVENTFD = "eventfd" not in _without and hasattr(os, "eventfd")
HAS_PIDFD = "pidfd" not in _without and _pidfd_works()
HAS_SETSIG = "setsig" not in _without and sys.platform == "linux" and hasattr(fcntl, "F_SETSIG")
IS_FREE_THREADED = "t" in sys.abiflags
"""Whether this is a free-threaded build of Python. The GIL may be enabled all the same."""


def uvloop_wanted() -> bool:
    """Whether the default loop of workers may be uvloop. It must also be installed."""
    return "uvloop" not in _without


def default_start_method() -> str:
    """Return "forkserver" if the system has pidfds and F_SETSIG, which percore's fork server needs, else "spawn"."""
    return "forkserver" if HAS_PIDFD and HAS_SETSIG else "spawn"
