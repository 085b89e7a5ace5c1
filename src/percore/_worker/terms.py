"""The terms of a call: its timeout and the context variables that came with it."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextvars import Context, ContextVar, copy_context
from importlib import import_module
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from percore._common.callables import qualified_name
from percore._common.errors import PayloadTooLarge, overrun
from percore._serialization.pickler import load

if TYPE_CHECKING:
    from percore._common.tracing import Span, Tracing
    from percore._protocol.interfaces import WorkerChannel
    from percore._protocol.messages import Body

Values = dict[int | str, Any]

_UNSET: Final = object()
_LIMIT: Final = 100_000
"""Largest pickle of the values in bytes, as for calls of the program."""
_FEW: Final = 16_384


class Terms(NamedTuple):
    """The terms of a call, as the supervisor sends them.

    Attributes:
        timeout: seconds that the call may run; None means no limit.
        values: values of context variables, by number, and the carrier of tracing, by name: a dict of scalars, or a pickle of a
            dict; None if none is set.
        is_broadcast: whether the call is a broadcast. If it needs a thread, it runs in a new one outside the pool.
        prefetch: of a stream: how many items it may send at first; 0: it is no stream.
        begin_by: the monotonic time by which the call must begin; None means no limit.
        announces: whether the worker sends STARTED when it begins the call.
        patience: of a stream: for how many seconds its thread waits for credits before another one may run in its place.
    """

    timeout: float | None = None
    values: "Values | bytes | None" = None
    is_broadcast: bool = False
    prefetch: int = 0
    begin_by: float | None = None
    announces: bool = False
    patience: float = 0.0

    def is_too_late(self) -> bool:
        """Whether the call must not begin any more. Call this once its start mark is set: see `Worker.fate`."""
        return self.begin_by is not None and monotonic() >= self.begin_by


class SentTerms:
    """The terms whose calls have not arrived: those of single calls, and the limits of all calls that are sent without terms."""

    def __init__(self) -> None:
        self.waiting: dict[int, Terms] = {}
        """By call. The server's fast path asks only whether any call may have terms, so `limited` is here, too, under 0, the id of
        no call."""
        self.limited: Terms | None = None
        """The terms of the calls that have none of their own, if BEGIN_BY or TIMEOUT has limited them."""
        self._limits = Terms()

    def under(self, call_id: int, body: tuple[Any, ...] | None) -> None:
        """Take the terms of a call, or drop them: the call went to another worker."""
        if body is None:
            self.waiting.pop(call_id, None)
        else:
            self.waiting[call_id] = Terms(*body)

    def begin_by(self, _zero: int, when: float | None) -> None:
        """Limit the wait of the calls that follow."""
        self._limit(self._limits._replace(begin_by=when))

    def timeout(self, _zero: int, seconds: float | None) -> None:
        """Limit the time of the calls that follow."""
        self._limit(self._limits._replace(timeout=seconds))

    def of(self, call_id: int, body: "Body") -> Terms | None:
        """Return the terms of a call that has arrived, and forget them."""
        limited = self.limited if type(body) is not int else None  # a parcel may arrive later than the calls sent with it
        if call_id not in self.waiting:
            return limited
        terms = self.waiting.pop(call_id)
        return terms if limited is None else terms._replace(begin_by=limited.begin_by)

    def _limit(self, limits: Terms) -> None:
        self._limits = limits
        if limits.begin_by is None and limits.timeout is None:
            self.limited = None
            self.waiting.pop(0, None)
        else:
            self.limited = self.waiting[0] = limits


class Variables:
    """The context variables of a runner, each imported when its first value arrives, and its tracing."""

    def __init__(self, references: Sequence[tuple[str, str]], tracing: "Tracing | None" = None) -> None:
        self._references = references
        self.tracing = tracing
        self._found: dict[int, ContextVar[Any]] = {}

    def context(self, values: "Values | bytes") -> Context:
        """Return a copy of the current context with these values set. Runs user code: imports and unpickling."""
        context = copy_context()
        loaded: Any = load(values) if isinstance(values, bytes) else values
        carrier: dict[str, str] = {}
        for number, value in loaded.items():
            if type(number) is str:
                carrier[number] = value
            else:
                context.run(self._variable(number).set, value)
        if carrier and self.tracing is not None:
            context.run(self.tracing.enter, carrier)
        return context

    def capture(self, channel: "WorkerChannel", span: "Span | None" = None) -> "Values | bytes | None":
        """Return the values that are set in the current context, as `context` takes them; None if none is set. Runs user code.

        The carrier of tracing is among them: that of `span`, or else of the current context.

        Raises:
            PayloadTooLarge: they take too many bytes.
        """
        values: Values = {}
        if self.tracing is not None:
            values.update(self.tracing.carrier() if span is None else span.carrier)
        for number, (module, name) in enumerate(self._references):
            variable = getattr(sys.modules.get(module), name, None)  # code that sets a variable has imported its module
            if variable is not None and (value := variable.get(_UNSET)) is not _UNSET:
                values[number] = value
        if not values or (
            sum(len(value) if isinstance(value, str | bytes) else 8 for value in values.values()) < _FEW
            and all(map(channel.passes, values.values()))
        ):
            return values or None
        pickled = channel.pickled(values)
        if len(pickled) > _LIMIT:
            raise PayloadTooLarge(
                _LIMIT, f"the values of the context variables take more than {_LIMIT} bytes when they are pickled"
            )
        return pickled

    def _variable(self, number: int) -> ContextVar[Any]:
        variable = self._found.get(number)
        if variable is None:
            module, name = self._references[number]
            variable = self._found[number] = getattr(import_module(module), name)
        return variable


async def within(seconds: float, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Call a coroutine function under `asyncio.timeout` and return its result.

    Raises:
        TimeoutError: it ran for too long. asyncio's own has no text.
    """
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await (fn(*args, **kwargs) if kwargs else fn(*args))
    except TimeoutError as error:
        if limit.expired() and not error.args and isinstance(error.__cause__, asyncio.CancelledError):
            error.args = overrun(qualified_name(fn), seconds).args
        raise
