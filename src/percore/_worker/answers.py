"""The user's data in a worker: what a call was sent, and what it answers. Runs user code, in any thread."""

import threading
from collections.abc import Callable
from typing import Any, Final, cast

from percore._errors import PayloadTooLarge
from percore._ipc.advice import IMPORT_ERRORS, advise_importing, unpicklable
from percore._ipc.channel import Channel
from percore._ipc.codec import is_inline_value
from percore._ipc.exceptions import dump_exception
from percore._ipc.leases import Received
from percore._ipc.pickles import load, qualified_name
from percore._ipc.presses import Presses
from percore._ipc.slots import Sink
from percore._messages import ERROR, LEASED, RESULT, UNLEASED, UNPICKLED, VALUE, Body, Payload
from percore._points import POINTS, point

Send = Callable[[int, int, Body], None]

SMALL: Final = 16_384
"""Bytes of a pickled result up to which it travels with others of its batch."""


class Function:
    """A function the supervisor has named by a number, unpickled by the first call that needs it."""

    __slots__ = ("fn", "kind", "loading", "name", "payload")

    def __init__(self, kind: int, payload: Payload) -> None:
        self.kind = kind
        self.payload = payload
        self.fn: Callable[..., Any] | None = None
        self.name = "percore"
        self.loading = threading.RLock()
        """Held by the thread that unpickles it."""


class Answers:
    """Unpacks calls and answers them. Whatever the user's code raises, BaseException included, goes to the caller of `unpack`."""

    def __init__(self, channel: Channel, *, main_by_value: bool) -> None:
        self._channel = channel
        self._main_by_value = main_by_value
        self._presses = Presses(channel.outgoing, main_by_value=main_by_value)
        channel.leases.on_end = self._unleased

    def _unleased(self, payload: int) -> None:
        if self._channel.is_open:
            self._channel.send_lazily(UNLEASED, 0, payload)

    def function(self, function: Function) -> Callable[..., Any]:
        """The function itself."""
        fn = function.fn
        if fn is None:
            # Who comes meanwhile waits: what is bound to it may be large, and each thread would begin a call and unpickle its own.
            # Where it fails, the next one tries by itself: the failure is that of a call.
            with function.loading:
                fn = function.fn
                if fn is None:
                    fn = function.fn = self._loaded(function)
        return fn

    def _loaded(self, function: Function) -> Callable[..., Any]:
        received = self._receive(function.payload)
        try:
            fn = cast("Callable[..., Any]", received.load())
        except IMPORT_ERRORS as error:
            advise_importing(error)
            raise
        function.name = qualified_name(fn)
        return fn

    def _receive(self, payload: Payload) -> Received:
        """What lies there, ready to be unpickled. Its lease, if it has one, is begun for the supervisor, too.

        Told before the views exist that end it: they may have gone when unpickling returns, and the loop may hear of that before
        this thread does anything else. What is queued goes in the order in which it was queued, whoever sends it.
        """
        received = self._channel.leases.receive(payload)
        if received.is_leased:
            self._channel.keep(LEASED, 0, payload)
        return received

    def unpack(
        self, call_id: int, function: Function | None, body: Body, send: Send
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any] | None]:
        """Function, arguments and keywords of a call."""
        if function is None:
            fn, args, kwargs = self._load(call_id, cast("Payload", body), send)
            return fn, args, kwargs
        fn = self.function(function)
        if type(body) is tuple:
            return fn, body, None
        args, kwargs = self._load(call_id, cast("Payload", body), send)
        return fn, args, kwargs

    def _load(self, call_id: int, payload: Payload, send: Send) -> Any:
        if type(payload) is bytes and payload[-1:] == b".":  # most of them: no buffers
            try:
                loaded = load(payload)
            except IMPORT_ERRORS as error:
                advise_importing(error)
                raise
        else:
            received = self._receive(payload)
            try:
                loaded = received.load()
            except IMPORT_ERRORS as error:
                advise_importing(error)
                raise
            finally:
                if type(payload) is int:
                    send(UNPICKLED, call_id, None)
        if POINTS:
            point("worker.call.unpickled")
        return loaded

    def result(self, call_id: int, value: object, send: Send, *, keep_small: bool = False) -> bytes | None:
        """Send a result; with `keep_small`, a small one that is no scalar is given back, pickled, instead."""
        if is_inline_value(value):
            if POINTS:
                point("worker.outcome.ready")
            send(VALUE, call_id, value)
            return None
        return self.pickled(call_id, value, send, keep_small=keep_small)

    def pickled(self, call_id: int, value: object, send: Send, *, keep_small: bool = False) -> bytes | None:
        """As `result`, of one that is no scalar."""
        press = self._presses.take()
        try:
            payload = press.payload(value)
        except PayloadTooLarge as error:
            self.error(call_id, error.with_traceback(None), send)  # of ours, which would itself be too large for some limits
        except BaseException as error:
            self.error(call_id, error if press.sink.lacks_room else self._refused(value, error), send)
        else:
            if POINTS:
                point("worker.outcome.stored" if type(payload) is int else "worker.outcome.ready")
            if type(payload) is bytes and len(payload) <= SMALL:
                if keep_small:
                    return payload
                send(RESULT, call_id, payload)
            else:
                self._channel.send_payload(RESULT, call_id, payload, send)
        return None

    def _refused(self, value: object, error: BaseException) -> BaseException:
        """What a caller gets whose result could not be pickled, by this error."""
        return unpicklable(value, error)

    def error(self, call_id: int, error: BaseException, send: Send) -> None:
        """Send what was raised."""
        sink = dump_exception(error, lambda: Sink(self._channel.outgoing), main_by_value=self._main_by_value)
        if POINTS:
            point("worker.outcome.ready")
        self._channel.send_payload(ERROR, call_id, sink.payload(), send)
