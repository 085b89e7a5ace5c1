"""The worker that a call runs in: `current_worker()` and `state()`."""

from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from socket import socket
from typing import Any, Final, TypeVar, overload

T = TypeVar("T")

_FIXED: Final = "a CurrentWorker cannot be changed: it says in which worker a call runs"


class CurrentWorker:
    """The worker that a call runs in.

    Attributes:
        index: the worker's slot, counted from 0.
        generation: how many workers the slot has had, including this one.
        pid: the process id.
        node: the name of its node; None where the workers run on the program's own machine.
        sockets: the sockets on which the worker serves, in the order of the runner's `listen`. They listen, and do not block. A
            copy that was pickled has none.
    """

    # No dataclass: every start waits for this module in the fork server, and `dataclasses` takes longer than all the rest of it.

    __slots__ = __match_args__ = ("index", "generation", "pid", "sockets", "node")

    index: int
    generation: int
    pid: int
    sockets: tuple[socket, ...]
    node: str | None

    def __init__(self, index: int, generation: int, pid: int, sockets: tuple[socket, ...] = (), node: str | None = None) -> None:
        for name, value in zip(self.__slots__, (index, generation, pid, sockets, node), strict=True):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(_FIXED)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(_FIXED)

    def _identity(self) -> tuple[int, int, int, str | None]:
        return self.index, self.generation, self.pid, self.node

    def __eq__(self, other: object) -> bool:
        return self._identity() == other._identity() if isinstance(other, CurrentWorker) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._identity())

    def __repr__(self) -> str:
        return f"CurrentWorker(index={self.index}, generation={self.generation}, pid={self.pid}, node={self.node!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return CurrentWorker, (self.index, self.generation, self.pid, (), self.node)


class WorkerContext:
    """A worker as seen by its calls."""

    __slots__ = ("families", "has_value", "shares", "strike", "value", "worker")

    def __init__(self, worker: CurrentWorker) -> None:
        self.worker = worker
        self.shares: Any = None
        """The worker's `WorkerShares`, once it serves."""
        self.families: Any = None
        """The nested calls of the worker's calls: its `Families`, once it serves; None for an executor."""
        self.strike: Callable[[], None] | None = None
        """Kills the worker at once, from any thread, where it is no process that could be killed."""
        self.value: Any = None
        self.has_value = False

    def enter(self, value: object) -> None:
        """Store `value`, which the lifespan has yielded."""
        self.value = value
        self.has_value = True

    def leave(self) -> None:
        """Drop the value: the lifespan has ended."""
        self.value = None
        self.has_value = False


# A worker process has one context for all its threads, including those that user code starts. Workers that share a process (in a
# test's engine) have one each, which their tasks and threads inherit.
of_process: WorkerContext | None = None
of_task: Final[ContextVar[WorkerContext | None]] = ContextVar("percore_worker", default=None)

# A task, a callback and, from a task, a call in a thread copy the context of the code that creates them. Calls are received in a
# context in which this is set, and the lifespan runs in one in which it is not. This tells the tasks of calls from the lifespan's.
of_call: Final[ContextVar[bool]] = ContextVar("percore_of_call", default=False)


of_id: Final[ContextVar[int | None]] = ContextVar("percore_call", default=None)
"""The id of the call that this code belongs to."""


def context_of_calls() -> Context:
    """Return a copy of the current context, for the code that receives and runs calls."""
    context = copy_context()
    context.run(of_call.set, True)
    return context


importing_main = False
"""Whether this worker is running the user's script in order to find a name in it."""


UNGUARDED: Final = "starts percore when a worker imports it: put the start under `if __name__ == '__main__':`"


class StartedByImport(RuntimeError):
    """The user's script starts percore while a worker imports it."""


def check_start() -> None:
    """Refuse to start percore while this worker imports the user's script: the new workers would import it as well, without end.

    Raises:
        StartedByImport: this worker is importing the user's script.
    """
    if importing_main:
        raise StartedByImport(f"your script {UNGUARDED}")


def current() -> WorkerContext | None:
    """Return the worker that this code runs in, or None outside a worker."""
    return of_task.get() or of_process


def current_context(what: str) -> WorkerContext:
    """Return the worker that this code runs in.

    Raises:
        RuntimeError: it runs in none; `what` is the function that needs one.
    """
    found = current()
    if found is None:
        raise RuntimeError(f"percore.{what}() works only in a worker, inside a call")
    return found


def current_worker() -> CurrentWorker:
    """Return the index, generation and pid of the worker that this call runs in.

    Raises:
        RuntimeError: the caller does not run in a worker.
    """
    return current_context("current_worker").worker


@overload
def state() -> Any: ...
@overload
def state(kind: type[T], /) -> T: ...
@overload
def state(kind: Callable[..., T], /) -> T: ...  # abstract classes and protocols, which are not type[T]
def state(kind: Any = None, /) -> Any:
    """Return the value that the lifespan of this worker yielded.

    Args:
        kind: the expected class of the value. `state` checks it at run time, and type checkers infer it as the return type. It may
            be an abstract class, a protocol (checked only with `typing.runtime_checkable`) or a parametrized class such as
            `dict[str, int]` (its parameters are not checked).

    Raises:
        RuntimeError: the caller does not run in a worker, or the runner has no lifespan.
        TypeError: the value is not an instance of `kind`, or `kind` is not a class.
    """
    found = current_context("state")
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
        if getattr(kind, "_is_protocol", False):  # not runtime_checkable: isinstance() refuses it
            return True
        if isinstance(kind, type):  # its own __instancecheck__ has raised
            raise
        raise TypeError(f"percore.state takes a class, such as aiohttp.ClientSession, not {kind!r}") from None
