"""What a call can ask of the worker it runs in."""

from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, Final, TypeVar, overload

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CurrentWorker:
    """The worker a call runs in.

    Attributes:
        index: its slot, from 0.
        generation: how many workers the slot has had, this one included.
        pid: its process id.
    """

    index: int
    generation: int
    pid: int


class WorkerContext:
    """One worker, as its calls see it."""

    __slots__ = ("has_value", "shares", "value", "worker")

    def __init__(self, worker: CurrentWorker) -> None:
        self.worker = worker
        self.shares: Any = None
        """What the worker knows of shared objects, once it serves."""
        self.value: Any = None
        self.has_value = False

    def enter(self, value: object) -> None:
        """The lifespan has yielded `value`."""
        self.value = value
        self.has_value = True

    def leave(self) -> None:
        """The lifespan ends."""
        self.value = None
        self.has_value = False


# A worker process has one context for all of its threads, whoever made them. Workers inside one process (a test's engine) have
# one each, which their tasks and threads inherit.
of_process: WorkerContext | None = None
of_task: Final[ContextVar[WorkerContext | None]] = ContextVar("percore_worker", default=None)

# A task, a callback and, from a task, a thread's call copy the context of whoever makes them. So what calls start is told from what
# the lifespan starts: calls are received in a context in which this is set, and the lifespan runs in one in which it is not.
of_call: Final[ContextVar[bool]] = ContextVar("percore_of_call", default=False)


def context_of_calls() -> Context:
    """A copy of the current context for what receives and runs calls."""
    context = copy_context()
    context.run(of_call.set, True)
    return context


importing_main = False
"""Whether this worker is running the user's script, to find something of it."""


UNGUARDED: Final = "starts percore when a worker imports it: put the start under `if __name__ == '__main__':`"


class StartedByImport(RuntimeError):
    """The user's script starts percore in the worker that imports it."""


def check_start() -> None:
    """That no worker is importing the user's script, which would start workers that import it, and so on.

    Raises:
        StartedByImport: one is.
    """
    if importing_main:
        raise StartedByImport(f"your script {UNGUARDED}")


def current() -> WorkerContext | None:
    """The worker that this code runs in; None: in none."""
    return of_task.get() or of_process


def _current(what: str) -> WorkerContext:
    found = current()
    if found is None:
        raise RuntimeError(f"percore.{what}() works only in a worker, inside a call")
    return found


def current_worker() -> CurrentWorker:
    """Index, generation and pid of the worker this call runs in.

    Raises:
        RuntimeError: outside a worker.
    """
    return _current("current_worker").worker


@overload
def state() -> Any: ...
@overload
def state(kind: type[T], /) -> T: ...
@overload
def state(kind: Callable[..., T], /) -> T: ...  # abstract classes and protocols, which are no type[T]
def state(kind: Any = None, /) -> Any:
    """What the lifespan of this worker yielded.

    Args:
        kind: its expected class, which is checked and which type checkers then know. It may be abstract, a protocol (one without
            `typing.runtime_checkable` is not checked) or have parameters (which are not checked).

    Raises:
        RuntimeError: outside a worker, or without a lifespan.
        TypeError: it is no `kind`, or `kind` is no class.
    """
    found = _current("state")
    if not found.has_value:
        raise RuntimeError("this runner has no lifespan, and percore.state() needs one: percore.Runner(lifespan=...)")
    if kind is not None and not _is_instance(found.value, kind):
        raise TypeError(
            f"the lifespan yields {type(found.value).__name__}, not {kind.__name__ if isinstance(kind, type) else kind}"
        )
    return found.value


def _is_instance(value: object, kind: Any) -> bool:
    try:
        return isinstance(value, kind)
    except TypeError:
        if isinstance(origin := getattr(kind, "__origin__", None), type):  # dict[str, int]
            return isinstance(value, origin)
        if getattr(kind, "_is_protocol", False):  # one that is not for isinstance
            return True
        if isinstance(kind, type):  # its own __instancecheck__ has raised
            raise
        raise TypeError(f"percore.state takes a class, such as aiohttp.ClientSession, not {kind!r}") from None
