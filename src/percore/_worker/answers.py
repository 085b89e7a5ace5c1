"""Unpickles functions and arguments in a worker, and sends results and errors. Runs user code, in any thread."""

import threading
from collections.abc import Callable
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Final, cast

from percore._common.callables import qualified_name
from percore._common.errors import PayloadTooLarge
from percore._common.fault_points import POINTS, point
from percore._protocol.messages import ERROR, RESULT, UNPICKLED, VALUE, Body, Payload
from percore._serialization.advice import IMPORT_ERRORS, advise_call, advise_importing, unpicklable, unpicklable_item
from percore._serialization.pickler import load
from percore._worker.sampling import UNGAUGED, FunctionGauges, Sampler

if TYPE_CHECKING:
    from percore._protocol.interfaces import WorkerChannel
    from percore._worker.pacing import Pace

Send = Callable[[int, int, Body], None]
Unpacked = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any] | None, FunctionGauges]
"""A call: its function, its arguments, its keyword arguments, and the function's gauges."""

SMALL: Final = 16_384
"""Largest pickled result, in bytes, that is sent together with other results of its batch."""


class ItemFailed(Exception):
    """An item of a stream cannot be pickled.

    Attributes:
        error: the exception for the consumer.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class WorkerFunction:
    """A function that the supervisor has given a number. The first call that needs it unpickles it."""

    __slots__ = ("fn", "gauges", "is_paced", "kind", "loading", "name", "pace", "payload")

    def __init__(self, kind: int, payload: Payload) -> None:
        self.kind = kind
        self.payload = payload
        self.fn: Callable[..., Any] | None = None
        self.name = "percore"
        self.pace: Pace | None = None
        """How many calls of a plain function run at once; None until the first one."""
        self.is_paced = True
        """Whether calls may have to wait for their pace."""
        self.gauges = UNGAUGED
        """Those of its name, once it is unpickled."""
        self.loading = threading.RLock()
        """Held by the thread that unpickles the function."""


class Answers:
    """Unpacks calls and answers them. Any exception of the user's code, also a BaseException, propagates from `unpack`."""

    def __init__(self, channel: "WorkerChannel", sampler: Sampler | None = None) -> None:
        """`sampler`: None if the worker measures nothing."""
        self._channel = channel
        self._sampler = sampler
        self._pickler = channel.pickler
        self.passes, self.pack_values = channel.passes, channel.pack_values

    def function(self, function: WorkerFunction) -> Callable[..., Any]:
        """Return the function itself. Unpickle it first if no call has done so yet."""
        fn = function.fn
        if fn is None:
            # Other threads wait here: otherwise each would begin a call and unpickle its own copy of what is bound to the function,
            # which may be large. If unpickling fails, only this call fails, and the next one tries again.
            with function.loading:
                fn = function.fn
                if fn is None:
                    fn = function.fn = self._loaded(function)
        return fn

    def _loaded(self, function: WorkerFunction) -> Callable[..., Any]:
        received = self._channel.load(function.payload)
        try:
            fn = cast("Callable[..., Any]", received.load())
        except IMPORT_ERRORS as error:
            advise_importing(error)
            raise
        function.name = qualified_name(fn)
        function.gauges = self._gauges_of(fn)
        return fn

    def _gauges_of(self, fn: Callable[..., Any]) -> FunctionGauges:
        return UNGAUGED if self._sampler is None else self._sampler.gauges_of(fn)

    def unpack(self, call_id: int, function: WorkerFunction | None, body: Body, send: Send) -> Unpacked:
        """Return the function, the arguments and the keyword arguments of a call, and the function's gauges."""
        if function is None:
            began = monotonic_ns()
            fn, args, kwargs = self._load(call_id, body, send)
            gauges = self._gauges_of(fn)
            gauges.loads.left -= 1
            if gauges.loads.left < 0:
                gauges.loads.took(monotonic_ns() - began)
            return fn, args, kwargs, gauges
        fn = function.fn
        if fn is None:
            fn = self.function(function)
        gauges = function.gauges
        if type(body) is tuple:
            return fn, body, None, gauges
        loads = gauges.loads
        loads.left -= 1
        began = monotonic_ns() if loads.left < 0 else 0
        args, kwargs = self._load(call_id, body, send)
        if began:
            loads.took(monotonic_ns() - began)
        return fn, args, kwargs, gauges

    def _load(self, call_id: int, payload: Any, send: Send) -> Any:
        try:
            if type(payload) is bytes and payload[-1:] == b".":  # the common case: a pickle without buffers
                loaded = load(payload)
            else:
                received = self._channel.load(payload)
                try:
                    loaded = received.load()
                finally:
                    if type(payload) is int:
                        send(UNPICKLED, call_id, None)
        except IMPORT_ERRORS as error:
            advise_importing(error)
            raise
        if POINTS:
            point("worker.call.unpickled")
        return loaded

    def result(
        self, call_id: int, value: object, send: Send, gauges: FunctionGauges = UNGAUGED, *, keep_small: bool = False
    ) -> bytes | None:
        """Send a result. With `keep_small`, do not send a small result that is not a scalar: return its pickle instead."""
        if self.passes(value):
            if POINTS:
                point("worker.outcome.ready")
            send(VALUE, call_id, value)
            return None
        return self.pickled(call_id, value, send, gauges, keep_small=keep_small)

    def pickled(
        self, call_id: int, value: object, send: Send, gauges: FunctionGauges = UNGAUGED, *, keep_small: bool = False
    ) -> bytes | None:
        """Like `result`, for a value that is not a scalar."""
        dumps, pickler = gauges.dumps, self._pickler()
        dumps.left -= 1
        began = monotonic_ns() if dumps.left < 0 else 0
        try:
            payload = pickler.payload(value)
        except PayloadTooLarge as error:
            self.error(call_id, error.with_traceback(None), send)  # percore's own traceback would itself exceed some limits
        except BaseException as error:
            self.error(call_id, error if pickler.lacks_room else self._refused(value, error), send)
        else:
            if began:
                dumps.took(monotonic_ns() - began)
            if POINTS:
                point("worker.outcome.stored" if type(payload) is int else "worker.outcome.ready")
            if type(payload) is bytes and len(payload) <= SMALL:
                if keep_small:
                    return payload
                send(RESULT, call_id, payload)
            else:
                self._channel.send_payload(RESULT, call_id, payload, send)
        return None

    def item(self, value: object, gauges: FunctionGauges = UNGAUGED) -> Payload:
        """Pickle an item of a stream.

        Raises:
            ItemFailed: it cannot be pickled.
        """
        dumps, pickler = gauges.dumps, self._pickler()
        dumps.left -= 1
        began = monotonic_ns() if dumps.left < 0 else 0
        try:
            payload = pickler.payload(value)
        except PayloadTooLarge as error:
            raise ItemFailed(error.with_traceback(None)) from error
        except BaseException as error:
            raise ItemFailed(error if pickler.lacks_room else unpicklable_item(value, error)) from error
        if began:
            dumps.took(monotonic_ns() - began)
        return payload

    def _refused(self, value: object, error: BaseException) -> BaseException:
        """Return the exception that the caller gets if pickling its result raised `error`."""
        return unpicklable(value, error)

    def error(self, call_id: int, error: BaseException, send: Send) -> None:
        """Send an exception as the outcome of a call."""
        if POINTS:
            point("worker.outcome.ready")
        advise_call(error)
        self._channel.send_exception(ERROR, call_id, error, send)
