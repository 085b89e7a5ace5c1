"""Every error percore raises, and every sentence a user reads in one.

    PercoreError
     ├── WorkerDied        (BrokenProcessPool)  the worker that ran this call died          \
     ├── RunnerBroken      (BrokenProcessPool)  no worker can be started any more            } in _broken
     ├── StartupFailed     (BrokenProcessPool)  the first start failed                      /
     ├── RunnerClosed      (RuntimeError)       not started yet, closing, or closed
     ├── RunnerFull        (RuntimeError)       max_pending calls are accepted and not done
     ├── RemoteError                            what was raised there cannot exist here
     └── PayloadTooLarge   (ValueError)         one message above max_message

Each takes fields, composes its sentence from them, and pickles by them. The three that derive from the standard library's
BrokenProcessPool live in `_broken`: importing that class costs tens of milliseconds, which a worker need not spend.
"""

from typing import ClassVar


class PercoreError(Exception):
    """Base of every error that percore itself raises."""

    _fields: ClassVar[tuple[str, ...]] = ()

    def __reduce__(self) -> tuple[object, ...]:
        # Built again from its fields; what the user added (notes, attributes) follows as state.
        fields = tuple(getattr(self, name) for name in self._fields) if self._fields else self.args
        return type(self), fields, self.__dict__.copy() or None


class RunnerClosed(PercoreError, RuntimeError):
    """The runner takes no calls: it was not started yet, is closing, or is closed.

    Also the outcome of calls that closing cut off.
    """

    _fields = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)


class RunnerFull(PercoreError, RuntimeError):
    """`submit` at the bound that `max_pending` sets: so many calls are accepted and not done.

    Attributes:
        limit: that bound.
    """

    _fields = ("limit",)

    def __init__(self, limit: int) -> None:
        self.limit = limit
        super().__init__(f"runner full: max_pending={limit} calls are pending; submit() never waits, `await runner.run(...)` does")


class RemoteError(PercoreError):
    """Something was raised in a worker that cannot arrive as itself.

    Either it is no ordinary exception (SystemExit, KeyboardInterrupt, a CancelledError nobody asked for), or it does not survive
    pickling, or a result could not be pickled.

    Attributes:
        type_name: qualified name of the class that was raised.
        text: what `str()` gave there.
        remote_traceback: the formatted traceback.
    """

    _fields = ("type_name", "text", "remote_traceback")

    def __init__(self, type_name: str, text: str, remote_traceback: str = "") -> None:
        self.type_name = type_name
        self.text = text
        self.remote_traceback = remote_traceback
        super().__init__(f"{type_name}: {text}" if text else type_name)


class PayloadTooLarge(PercoreError, ValueError):
    """One pickled message is larger than `limit` bytes.

    Arguments of a call and results may take `max_message` bytes. The values of context variables, which go with every call, may
    take 100,000.
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
    """Carries the traceback of the worker as text, at the end of the `__cause__` chain of what was raised there."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(text)

    def __str__(self) -> str:
        return f'\n"""\n{self.text.rstrip()}\n"""'


def shown(error: BaseException) -> str:
    """`repr(error)`. Never raises, whatever its own `__repr__` does."""
    try:
        return repr(error)
    except BaseException:
        return f"a {type.__repr__(type(error))} whose repr() failed"


def as_error(error: BaseException, whose: str) -> Exception:
    """What the user's code has raised, as a future can carry it: itself, unless it would end the program of whoever awaits it.

    `whose`: what raised it, for the sentence that it is told with otherwise.
    """
    kind = type(error)  # not isinstance(), which asks the user's class
    if issubclass(kind, Exception) and not issubclass(kind, StopIteration):
        return error  # type: ignore[return-value]
    return RuntimeError(f"{whose} raised {shown(error)}")


for _class in (PercoreError, RunnerClosed, RunnerFull, RemoteError, PayloadTooLarge):
    _class.__module__ = "percore"
