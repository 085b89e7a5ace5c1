"""The options of a Runner: their meaning, defaults and validation. The list is closed.

The validating functions are also used for the options of calls, of maps and of LoopPoolExecutor.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncContextDecorator, ContextDecorator, suppress
from contextvars import ContextVar
from functools import wraps
from socket import socket
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, cast, get_args

from percore._common import hardening
from percore._common.engines import AnyEngine, EngineChoice, engine_of
from percore._common.system import HAS_PIDFD, HAS_SETSIG, default_start_method
from percore._common.tracing import Installed, Tracing

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from percore._common.addresses import Address

Lifespan: TypeAlias = Callable[[], AbstractAsyncContextManager[Any] | AbstractContextManager[Any]]
RetryOn: TypeAlias = type[BaseException] | tuple[type[BaseException], ...] | Callable[[BaseException], object]
Backoff: TypeAlias = float | Callable[[int], float]
StartMethod: TypeAlias = Literal["forkserver", "spawn"]
Listen: TypeAlias = Iterable[str | socket]

_FOR_EVER: Final = 1e9
MOST_WORKERS: Final = 1024
_LEAST_MESSAGE: Final = 1024
_MOST_MESSAGE: Final = 1 << 36
_LEAST_MEMORY: Final = 1 << 24

PREFETCH: Final = 16
"""Items of a stream that may be produced and not taken, unless the options of the call set another number."""


def usable_cpus() -> int:
    """Return how many CPUs this process may use: the smaller of its CPU affinity and its cgroup's CPU quota, rounded up."""
    return max(1, math.ceil(min(allowed_cpus(), cpu_quota())))


def allowed_cpus() -> int:
    """Return how many CPUs the CPU affinity of this process allows."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota() -> float:
    """Return the CPU quota of this process's cgroup, in CPUs. Infinity: it has none."""
    return min(_cgroup_quotas())


def _cgroup_quotas() -> Iterator[float]:
    """Yield the CPU quotas, in CPUs, of this process's cgroup and its ancestors (v2 and v1). Infinity: no quota."""
    yield math.inf
    with suppress(OSError):
        for line in text_of("/proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from _quotas("/sys/fs/cgroup", path, ("cpu.max",))
            elif "cpu" in controllers.split(","):
                yield from _quotas("/sys/fs/cgroup/cpu", path, ("cpu.cfs_quota_us", "cpu.cfs_period_us"))


def _quotas(root: str, path: str, files: tuple[str, ...]) -> Iterator[float]:
    # In a container the path may belong to the host's hierarchy, of which only the root is mounted. So look at the root too.
    names = path.strip("/").split("/")
    for count in range(len(names) + 1):
        folder = "/".join((root, *names[:count]))
        with suppress(OSError, ValueError, ZeroDivisionError):  # without a quota its file has "max", or -1 for the quota
            quota, period = " ".join(text_of(f"{folder}/{file}") for file in files).split()
            if int(quota) > 0:
                yield int(quota) / int(period)


def text_of(path: str) -> str:
    """Return the text of a file. (This avoids importing pathlib before the first process can be started.)

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, errors="surrogateescape") as file:
        return file.read()


def whole(name: str, value: object, least: int, most: int | None = None) -> int:
    """Return `value` if it is a whole number from `least` to `most`.

    Raises:
        TypeError, ValueError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if value < least or (most is not None and value > most):
        span = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be {span}, not {value}")
    return value


def seconds_of(name: str, value: object) -> float:
    """Return `value` as a float if it is a positive, finite number of seconds.

    Raises:
        TypeError, ValueError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds, not {value!r}")
    try:
        seconds = float(value)
    except OverflowError:  # an int too large for a float
        seconds = math.inf
    if not 0 < seconds < math.inf:
        raise ValueError(f"{name} must be a positive number of seconds, not {seconds:g}")
    return seconds


def grace_of(value: object) -> float | None:
    """Return the `grace` of a close in seconds, or None for no limit.

    Raises:
        TypeError, ValueError: it is neither None nor a number of seconds.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"grace must be None or a number of seconds, not {value!r}")
    if math.isnan(value):
        raise ValueError("grace must be None or a number of seconds, not nan")
    return None if value > _FOR_EVER else max(0.0, float(value))


F = TypeVar("F", bound=Callable[..., Any])


def advising(name: str, advice: dict[str, str]) -> Callable[[F], F]:
    """Decorate a public function so that an unknown keyword argument raises a TypeError with advice.

    `name`: the function's name in the message. `advice`: hints by keyword; a misspelt one gets the nearest name. Do not decorate
    functions that make calls: the wrapper costs as much as a call.
    """

    def decorate(fn: F) -> F:
        code = fn.__code__
        known = code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]
        options = [one for one in known if one != "self"]
        fn.__qualname__ = name  # the name in Python's own messages about wrong arguments

        @wraps(fn)
        def called(*args: Any, **kwargs: Any) -> Any:
            for keyword in kwargs:
                if keyword not in known:
                    hint = advice.get(keyword) or _nearest(keyword, options) + f"it takes {', '.join(options)}"
                    raise TypeError(f"{name}() got an unexpected keyword argument {keyword!r}: {hint}")
            return fn(*args, **kwargs)

        return cast(F, called)

    return decorate


def _nearest(keyword: str, options: list[str]) -> str:
    from difflib import get_close_matches  # not at the top: it is needed for a mistake only

    near = get_close_matches(keyword, options, n=1)
    return f"did you mean {near[0]}=? " if near else ""


def _callable(name: str, value: object, example: str) -> None:
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be callable, such as {name}={example}, not {value!r}")


def _bound(name: str, value: object) -> int | None:
    return None if value is None else whole(name, value, 1)


def _memory(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"max_memory_per_worker must be a whole number of bytes, such as 512 * 2**20, not {value!r}")
    if value < _LEAST_MEMORY:
        raise ValueError(
            f"max_memory_per_worker must be at least {_LEAST_MEMORY} bytes, not {value}: a worker that has run nothing takes "
            "nearly that much. Give the number of bytes, such as 512 * 2**20"
        )
    return value


def _harden(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"harden must be True or False, not {value!r}")
    if value and not hardening.can_close():
        raise ValueError("harden=True needs Linux, and a Python that has ctypes")
    return value


def _variables(values: object) -> "tuple[ContextVar[Any], ...]":
    if isinstance(values, ContextVar):
        raise TypeError(f"contextvars must be a list, such as contextvars=[{values.name}], not one ContextVar")
    if not isinstance(values, Iterable):
        raise TypeError(f"contextvars must be ContextVars, not {values!r}")
    variables = tuple(values)
    for variable in variables:
        if not isinstance(variable, ContextVar):
            raise TypeError(f"contextvars must be ContextVars, not {variable!r}")
    return variables


def _addresses(listen: object) -> "tuple[Address | socket, ...]":
    if isinstance(listen, tuple) and not listen:
        return ()
    from percore._common.addresses import listen_of  # few runners listen

    return listen_of(listen)


_SETUP: Final = "put the setup of a worker in lifespan=..., and that of a thread in thread_initializer=..."
RUNNER_ADVICE: Final = (
    dict.fromkeys(("max_workers", "processes", "n_jobs"), "write workers=...")
    | dict.fromkeys(("max_tasks_per_child", "maxtasksperchild"), "write max_tasks_per_worker=...")
    | dict.fromkeys(
        ("max_memory_per_child", "worker_max_memory_per_child", "memory_limit"), "write max_memory_per_worker=..., in bytes"
    )
    | dict.fromkeys(("initializer", "initargs"), _SETUP)
    | {
        "max_threads": "write threads=...",
        "childconcurrency": "write concurrency=...",
        "loop_initializer": "write loop_factory=...",
        "mp_context": 'write start_method="forkserver" or "spawn"; percore.LoopPoolExecutor takes an mp_context',
        "timeout": "it is an option of the calls, as in runner.options(timeout=5).run(...)",
        **dict.fromkeys(("bind", "host", "port", "sockets"), 'write listen=["127.0.0.1:8080"]'),
        "chunksize": "there is no chunk size to tune, percore batches short calls by how long they take",
        "debug": "workers take the debug flag of this program's event loop",
    }
)
"""Advice for keyword arguments that other pools have and a Runner has not, by name."""


class RunnerOptions(NamedTuple):
    """The validated options of one Runner, with the names and the meaning of its arguments."""

    workers: int
    lifespan: Lifespan | None
    concurrency: int
    threads: int
    loop_factory: "Callable[[], AbstractEventLoop] | None"
    start_method: StartMethod
    max_message: int
    start_timeout: float
    kill_after: float
    max_tasks_per_worker: int | None
    max_memory_per_worker: int | None
    retries: int
    per_key: int | None
    contextvars: "tuple[ContextVar[Any], ...]"
    thread_initializer: Callable[[], object] | None
    max_pending: int | None
    blocked_after: float | None
    listen: "tuple[Address | socket, ...]"
    engine: EngineChoice | None = None
    """None: processes."""
    harden: bool = False
    is_counted: bool = False
    """Whether `workers` was left open: the number is that of the CPUs."""
    tracing: Tracing | None = None
    """No argument of a runner: the tracing library that is installed when the runner is made."""

    @classmethod
    def checked(  # noqa: PLR0913  # each a documented knob; the list is closed
        cls,
        *,
        workers: int | None,
        lifespan: Lifespan | None,
        concurrency: int,
        threads: int | None,
        loop_factory: "Callable[[], AbstractEventLoop] | None",
        start_method: StartMethod | None,
        max_message: int,
        start_timeout: float,
        kill_after: float,
        max_tasks_per_worker: int | None,
        max_memory_per_worker: int | None,
        retries: int,
        per_key: int | None,
        contextvars: "Iterable[ContextVar[Any]]",
        thread_initializer: Callable[[], object] | None,
        max_pending: int | None,
        blocked_after: float | None,
        listen: Listen,
        engine: AnyEngine | None = None,
        harden: bool = False,
    ) -> "RunnerOptions":
        """Return the validated options of a user, with defaults filled in.

        Raises:
            TypeError: a value has the wrong type.
            ValueError: a value is out of range, or this system does not support the start method.
        """
        choice = engine_of(engine)
        if choice is not None:
            choice._check(
                {
                    "start_method": start_method,
                    "max_message": max_message,
                    "max_memory_per_worker": max_memory_per_worker,
                    "listen": listen,
                    "harden": harden,
                }
            )
        cpus = usable_cpus()
        _callable("lifespan", lifespan, "open_session")
        if isinstance(
            lifespan, ContextDecorator | AsyncContextDecorator
        ):  # contextlib's context managers are callable too, but not without arguments
            raise TypeError("give the function itself: lifespan=open_session, not lifespan=open_session()")
        _callable("loop_factory", loop_factory, "asyncio.new_event_loop")
        _callable("thread_initializer", thread_initializer, "open_connection")
        for name, called in (("loop_factory", loop_factory), ("thread_initializer", thread_initializer)):
            if called is not None:
                from percore._common.callables import check_plain  # inspect is not cheap to import

                check_plain(name, called)
        method = start_method if start_method is not None else default_start_method()
        if method not in get_args(StartMethod):
            extra = ". Forking a process that runs an event loop is not safe" if method == "fork" else ""
            raise ValueError(f'start_method must be "forkserver" or "spawn", not {method!r}{extra}')
        if method == "forkserver" and not (HAS_PIDFD and HAS_SETSIG):
            raise ValueError(
                'start_method="forkserver" needs pidfd_open and F_SETSIG (Linux 5.3 or newer); use start_method="spawn"'
            )
        return cls(
            workers=cpus if workers is None else whole("workers", workers, 1, MOST_WORKERS),
            lifespan=lifespan,
            concurrency=whole("concurrency", concurrency, 1, 1_000_000),
            threads=min(32, cpus + 4) if threads is None else whole("threads", threads, 1, 10_000),
            loop_factory=loop_factory,
            start_method=method,  # type: ignore[arg-type]  # checked above
            max_message=whole("max_message", max_message, _LEAST_MESSAGE, _MOST_MESSAGE),
            start_timeout=seconds_of("start_timeout", start_timeout),
            kill_after=seconds_of("kill_after", kill_after),
            max_tasks_per_worker=_bound("max_tasks_per_worker", max_tasks_per_worker),
            max_memory_per_worker=None if max_memory_per_worker is None else _memory(max_memory_per_worker),
            retries=whole("retries", retries, 0, 1_000_000),
            per_key=_bound("per_key", per_key),
            contextvars=_variables(contextvars),
            thread_initializer=thread_initializer,
            max_pending=_bound("max_pending", max_pending),
            blocked_after=None if blocked_after is None else seconds_of("blocked_after", blocked_after),
            listen=_addresses(listen),
            engine=choice,
            harden=_harden(harden),
            is_counted=workers is None,
            tracing=Installed.tracing,
        )
