"""The exception classes of percore.

    PercoreError
     ├── WorkerDied        (BrokenProcessPool)  the worker that ran this call died          \
     ├── RunnerBroken      (BrokenProcessPool)  percore has given up starting workers        } in worker_errors
     ├── StartupFailed     (BrokenProcessPool)  the first start failed                      /
     ├── RunnerClosed      (RuntimeError)       the runner is not started, is closing, or is closed
     ├── RunnerFull        (RuntimeError)       max_pending calls are pending
     ├── RemoteError                            an exception or a result that could not be sent back as itself
     └── PayloadTooLarge   (ValueError)         a message is larger than max_message
    RemoteTraceback                             the cause of an exception that a function has raised in a worker

Each class takes its fields as arguments, composes its message from them, and is pickled by them. The three classes that derive from
the standard library's BrokenProcessPool are in `_common.worker_errors`: importing that class takes tens of milliseconds, which
workers save.
"""

from typing import ClassVar, Final

CUT_OFF: Final = "the runner was closed before this call could end"


class PercoreError(Exception):
    """Base class of the errors that percore defines."""

    _fields: ClassVar[tuple[str, ...]] = ()

    def __reduce__(self) -> tuple[object, ...]:
        # Unpickling calls the class with these fields, and then restores what the user added (notes, attributes) from the state.
        fields = tuple(getattr(self, name) for name in self._fields) if self._fields else self.args
        return type(self), fields, self.__dict__.copy() or None


class IllegalEvent(Exception):
    """An event that the table of a state machine does not allow in this state: an error in percore, or a broken worker."""


class ThreadInitializerFailed(PercoreError):
    """The thread_initializer of an executor has raised `__cause__`. The executor is broken then, and users see that error."""


class RunnerClosed(PercoreError, RuntimeError):
    """The runner accepts no calls: it is not started, is closing, or is closed.

    Calls that were cut off by closing the runner fail with it too.

    Attributes:
        reason: the message.
    """

    _fields = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class RunnerFull(PercoreError, RuntimeError):
    """`submit` was called while `max_pending` calls were pending.

    Attributes:
        limit: the value of `max_pending`.
    """

    _fields = ("limit",)

    def __init__(self, limit: int) -> None:
        self.limit = limit
        super().__init__(f"runner full: max_pending={limit} calls are pending; submit() never waits, `await runner.run(...)` does")


class RemoteError(PercoreError):
    """A worker's exception, or its result, could not be sent back as itself.

    There are three cases: the function raised something that is not an Exception (such as SystemExit or KeyboardInterrupt) or a
    CancelledError without being cancelled; its exception could not be pickled or unpickled; or its result could not be pickled or
    unpickled.

    Attributes:
        type_name: the qualified name of the exception's class.
        text: `str()` of the exception, or what failed and why.
        remote_traceback: the formatted traceback, usually that in the worker; empty if there is none.
    """

    _fields = ("type_name", "text", "remote_traceback")

    def __init__(self, type_name: str, text: str, remote_traceback: str = "") -> None:
        self.type_name = type_name
        self.text = text
        self.remote_traceback = remote_traceback
        super().__init__(f"{type_name}: {text}" if text else type_name)


class PayloadTooLarge(PercoreError, ValueError):
    """A pickled message is larger than `limit` bytes.

    The limit is `max_message` for the arguments of a call and for its result. It is 100,000 for the values of the context variables
    that travel with a call.

    Attributes:
        limit: the limit in bytes.
        detail: the message; empty for the default message.
    """

    _fields = ("limit", "detail")

    def __init__(self, limit: int, detail: str = "") -> None:
        self.limit = limit
        self.detail = detail
        super().__init__(
            detail
            or f"a pickled message is larger than max_message={limit} bytes. "
            "Send less at once (a path, a key, a part), or make the runner with a larger max_message"
        )


class RemoteTraceback(Exception):
    """The worker's traceback as text, at the end of the `__cause__` chain of an exception from a worker."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(text)

    def __str__(self) -> str:
        return f'\n"""\n{self.text.rstrip()}\n"""'


def overrun(name: str, seconds: float) -> TimeoutError:
    """Return the error of a call that ran for longer than its `timeout`."""
    return TimeoutError(f"{name} ran for longer than timeout={seconds:g} s")


def shown(error: BaseException) -> str:
    """Return `repr(error)`, or a substitute if its `__repr__` raises."""
    try:
        return repr(error)
    except BaseException:
        return f"a {type.__repr__(type(error))} whose repr() failed"


def with_article(name: str) -> str:
    """Return the name of a class with its article: "a lock", "an Event", "an RLock"."""
    is_spelled = name[1:2].isupper() and name[0] in "FHLMNRSX"
    return f"an {name}" if name[0] in "AEIOaeio" or is_spelled else f"a {name}"


def as_error(error: BaseException, whose: str) -> Exception:
    """Return an exception of user code in a form that a future can hold.

    An Exception is returned as it is. A BaseException would end the program that awaits the future, and a future refuses a
    StopIteration: these become a RuntimeError that says `whose` code raised them.
    """
    kind = type(error)  # isinstance() would run code of the user's class
    if issubclass(kind, Exception) and not issubclass(kind, StopIteration):
        return error  # type: ignore[return-value]
    return RuntimeError(f"{whose} raised {shown(error)}")


for _class in (PercoreError, RunnerClosed, RunnerFull, RemoteError, PayloadTooLarge, RemoteTraceback):
    _class.__module__ = "percore"
