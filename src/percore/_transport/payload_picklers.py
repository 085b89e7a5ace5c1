"""Payload picklers: reusable picklers that turn objects into payloads.

Creating a pickler and its file takes longer than pickling a small object. So both are kept for the next object, but only after
small pickles.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar

from percore._protocol.messages import Payload
from percore._serialization.advice import unsendable
from percore._serialization.pickler import CANNOT, GLOBAL, PROTOCOL, FastPickler, finish, is_final
from percore._transport.slots import Sink, SlotWriter

if TYPE_CHECKING:
    from pickle import Pickler

_KEPT: Final = 16 << 10
"""A pickler is kept after a pickle of at most this many bytes, because the memo table of a pickler never shrinks."""


class PayloadPickler:
    """A pickler and its file, for one object at a time. Code that pickles another object meanwhile needs another pickler."""

    __slots__ = ("_idle", "_main_by_value", "_pickler", "sink")

    def __init__(self, sink: Sink, idle: "list[PayloadPickler]", *, main_by_value: bool) -> None:
        self.sink = sink
        self._idle = idle
        self._main_by_value = main_by_value
        self._pickler: Pickler = FastPickler(sink, PROTOCOL, buffer_callback=sink.keep)

    @property
    def lacks_room(self) -> bool:
        return self.sink.lacks_room

    def payload(self, obj: object) -> Payload:
        """Pickle `obj` and return the bytes, or the slot that holds them, which the caller must then discard.

        Call this only once for each pickler that `PayloadPicklers.take` returns.

        Raises:
            PayloadTooLarge: the pickle exceeds the limit of the slots.
            PicklingError, AttributeError, TypeError: neither pickle nor cloudpickle can pickle `obj`.
            BaseException: any exception of the user code that pickling runs.
        """
        sink = self.sink
        failed: type[Exception] | None = None
        try:
            self._pickler.dump(obj)
        except CANNOT as error:
            failed = type(error)
        except BaseException:
            sink.reset()
            raise
        else:
            pickled = sink.head
            if pickled is None or len(pickled) > _KEPT or sink.buffers:
                pass
            elif GLOBAL not in pickled or is_final(pickled, main_by_value=self._main_by_value):
                sink.head = None
                self._pickler.clear_memo()
                self._idle.append(self)
                return pickled
        finish(obj, sink, failed, main_by_value=self._main_by_value, beside=sink)
        return sink.payload()


class PayloadPicklers:
    """The picklers of one side of a runner. Any thread may use them."""

    def __init__(self, slots: SlotWriter, *, main_by_value: bool, sparing: bool = False) -> None:
        """With `sparing`, picklers take no slot while about half of the slots are in use (`SlotWriter.is_scarce`)."""
        self._slots = slots
        self._main_by_value = main_by_value
        self._sparing = sparing
        self._idle: list[PayloadPickler] = []

    def take(self) -> PayloadPickler:
        """Return an idle pickler, or a new one."""
        try:
            return self._idle.pop()
        except IndexError:
            return PayloadPickler(Sink(self._slots, sparing=self._sparing), self._idle, main_by_value=self._main_by_value)


P = TypeVar("P")


def pickle_to_share(
    obj: object, pickle: Callable[[object], P], loop: asyncio.AbstractEventLoop, then: Callable[[P | BaseException], object]
) -> None:
    """Pickle a shared object in a thread of its own. The loop then calls `then` with what `pickle` has returned, or with the error.

    After a Ctrl-C the loop may call `then` once more. The loop's default executor would not do: the user may have filled it with
    calls that never end.
    """
    from percore._common.sure_handles import surely_from_thread  # workers do without it

    def run(obj: object) -> None:
        try:
            pickled: P | BaseException = pickle(obj)
        except CANNOT as error:
            pickled = unsendable("share(): the object", obj, error)
        except BaseException as error:
            pickled = error
        del obj
        with suppress(RuntimeError):  # the loop was closed, so no task can be waiting
            surely_from_thread(loop, then, pickled)

    threading.Thread(target=run, args=(obj,), name="percore-share", daemon=True).start()
