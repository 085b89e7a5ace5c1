"""Presses: what makes payloads of objects, one after the other.

To make a pickler and its file takes longer than to pickle something small. So they are kept for the next object, as long as nothing
but a small pickle has come of them.
"""

from typing import TYPE_CHECKING, Final

from percore._ipc.pickles import CANNOT, GLOBAL, PROTOCOL, FastPickler, finish, is_final
from percore._ipc.slots import Sink, SlotWriter
from percore._messages import Payload

if TYPE_CHECKING:
    from pickle import Pickler

_KEPT: Final = 16 << 10
"""Bytes of a pickle behind which its press is kept: the table of what it has seen never becomes smaller."""


class Press:
    """A pickler and its file. For one object at a time: what is pickled may pickle something else meanwhile."""

    __slots__ = ("_idle", "_main_by_value", "_pickler", "sink")

    def __init__(self, sink: Sink, idle: "list[Press]", *, main_by_value: bool) -> None:
        self.sink = sink
        self._idle = idle
        self._main_by_value = main_by_value
        self._pickler: Pickler = FastPickler(sink, PROTOCOL, buffer_callback=sink.keep)

    def payload(self, obj: object) -> Payload:
        """Pickle `obj`: bytes, or the slot that holds them, which is then the caller's to discard. Once; then take another press.

        Raises:
            PayloadTooLarge: above the limit of the slots.
            PicklingError, AttributeError, TypeError: neither pickle nor cloudpickle can pickle it.
            BaseException: whatever user code on the way raises.
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


class Presses:
    """The presses of one side of a runner. From any thread."""

    def __init__(self, slots: SlotWriter, *, main_by_value: bool, sparing: bool = False) -> None:
        """`sparing`: take no slot when more than half of them are in use."""
        self._slots = slots
        self._main_by_value = main_by_value
        self._sparing = sparing
        self._idle: list[Press] = []

    def take(self) -> Press:
        """One that nobody uses."""
        try:
            return self._idle.pop()
        except IndexError:
            return Press(Sink(self._slots, sparing=self._sparing), self._idle, main_by_value=self._main_by_value)
