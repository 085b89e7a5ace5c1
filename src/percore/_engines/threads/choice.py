"""ThreadsEngine, what users give to `engine=` for workers that are threads of the program. Importing this module is cheap."""

import warnings
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

from percore._common.engines import EngineChoice, Maker

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from percore._engines.threads.engine import ThreadEngine
    from percore._protocol.worker_start import ExecutorSettings, Given

Copy: TypeAlias = Literal["never", "pickle"]

_REFUSED: Final = {
    "start_method": 'start_method says how processes are started, and the workers of engine="threads" are threads: leave it out',
    "max_message": (
        'max_message limits what is pickled, and engine="threads" passes arguments and results as they are: leave it out'
    ),
    "max_memory_per_worker": (
        'max_memory_per_worker needs processes: the workers of engine="threads" share the memory of the program. Use '
        'engine="processes", or leave it out'
    ),
    "harden": (
        'harden=True closes the processes of workers, and the workers of engine="threads" are threads of this one: use '
        'engine="processes", or leave it out'
    ),
}
_DEFAULTS: Final[dict[str, object]] = {"start_method": None, "max_message": 2**30, "max_memory_per_worker": None, "harden": False}


class ThreadsEngine(EngineChoice):
    """Workers that are threads of this process: `Runner(engine=percore.ThreadsEngine())`, or `engine="threads"` for the defaults.

    Each worker is a thread with an event loop, a lifespan and a thread pool of its own. On free-threaded Python (3.14t and newer)
    they run at once; elsewhere one at a time, which a RuntimeWarning says once. Nothing is pickled: calls get the caller's own
    objects, and the caller gets theirs. A crash takes the program, and a worker that does not end cannot be killed.

    Args:
        copy: "never" passes every object as it is. "pickle" pickles arguments and results as between processes, for code that
            relies on getting objects of its own.

    Raises:
        ValueError: `copy` is neither of the two.
    """

    def __init__(self, *, copy: Copy = "never") -> None:
        if copy not in get_args(Copy):
            raise ValueError(f'copy must be "never" or "pickle", not {copy!r}')
        self.copy: Copy = copy

    def __repr__(self) -> str:
        return f"percore.ThreadsEngine(copy={self.copy!r})"

    def _check(self, given: dict[str, Any]) -> None:
        for name, text in _REFUSED.items():
            if name in given and given[name] != _DEFAULTS[name]:
                raise ValueError(text)

    def _maker(self) -> "Maker":
        return _ThreadsMaker(self.copy)

    def _check_executor(self) -> None:
        """An executor can have it."""

    def _engine_of_executor(
        self, loop: "AbstractEventLoop", options: Any, settings: "ExecutorSettings", given: "Given | None"
    ) -> "ThreadEngine":
        return _engine(loop, options, self.copy, settings, given)


ThreadsEngine.__module__ = "percore"


class _ThreadsMaker(Maker):
    def __init__(self, copy: Copy) -> None:
        self._copy = copy

    def make(self, loop: "AbstractEventLoop", options: Any, _main: Any, /) -> "ThreadEngine":
        return _engine(loop, options, self._copy)


_told = False
"""Whether this process was told that only one thread runs at a time."""


def _engine(
    loop: "AbstractEventLoop",
    options: Any,
    copy: Copy,
    executor: "ExecutorSettings | None" = None,
    given: "Given | None" = None,
) -> "ThreadEngine":
    from percore._engines.threads.engine import ThreadEngine
    from percore._engines.threads.gil import one_at_a_time

    global _told
    if not _told and (why := one_at_a_time()):
        _told = True
        warnings.warn(f'engine="threads": only one thread runs at a time, because {why}', RuntimeWarning, stacklevel=2)
    return ThreadEngine(loop, options, copies=copy == "pickle", executor=executor, given=given)
