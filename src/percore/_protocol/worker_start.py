"""What a worker of any engine is started with: plain values, and pickles of the user's objects."""

from collections.abc import Callable
from typing import Any, NamedTuple

Given = tuple[Callable[..., object] | None, tuple[Any, ...]]
"""The initializer of an executor, if it has one, and its arguments."""


class ExecutorSettings(NamedTuple):
    """The settings of a worker of an executor, as the supervisor sends them.

    Attributes:
        is_pool: a call that cannot be unpickled ends the worker, and so does SIGTERM.
        max_tasks: number of calls after which the worker begins no other call; 0 means no limit.
        has_main: multiprocessing has set up `__main__` in this process.
        initializer: the pickled initializer and its arguments; empty if there is none or if it came with the process.
    """

    is_pool: bool
    max_tasks: int
    has_main: bool
    initializer: bytes


class WorkerStart(NamedTuple):
    """What a worker is started with. The pickles are empty for None.

    Attributes:
        index: the worker's slot.
        generation: how many workers the slot has had, including this one.
        threads: the largest number of threads for plain functions.
        lifespan: the pickled factory of the lifespan.
        thread_initializer: the pickled thread initializer.
        contextvars: module and name of each context variable of the runner.
        tracing: the pickled tracing library.
        executor: how the worker serves an executor; None for a Runner.
        is_measured: whether the worker measures its calls.
        node: the name of its node; None on the program's own machine.
        has_spare: whether there are more CPUs than workers.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody calls
    generation: int
    threads: int
    lifespan: bytes
    thread_initializer: bytes
    contextvars: tuple[tuple[str, str], ...]
    tracing: bytes
    executor: ExecutorSettings | None
    is_measured: bool = False
    node: str | None = None
    has_spare: bool = False
