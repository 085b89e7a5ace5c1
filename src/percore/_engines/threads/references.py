"""The stores of an engine whose workers are threads of this process: of references, or of pickles.

With `References` everything crosses as it is: arguments, results and exceptions are the very objects of the other side. What
percore passes on as a pickle (a call with keyword arguments, a nested call, a lifespan) is a `Reference`: bytes that unpickle to
the object itself, for as long as these bytes exist. So no other part of percore has to tell the two apart.

With `Copies` arguments and results are pickled as between processes.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any, Final, NoReturn

from percore._common.endings import settle
from percore._protocol.messages import Body, BrokenFrame, Payload
from percore._protocol.shared import Shared
from percore._serialization.advice import can_pickle
from percore._serialization.exceptions import dump_exception, passed_on
from percore._serialization.pickler import MemoryFile, dump, load
from percore._transport import codec

_WEIGHT: Final = codec.SMALL
"""The weight of every item in a batch: a reference takes as little room as a small number."""

_PLENTY: Final = 1 << 40
"""Of what has no limit here."""

_OWN: Final = "percore._worker"
"""The modules whose frames surround the user's in a traceback."""

_numbers: Final = count(1)
_things: Final[dict[int, object]] = {}
"""The objects of all references that exist, by number."""


class Reference(bytes):
    """Bytes that unpickle, in this process and while they exist, to one object.

    Attributes:
        thing: the object.
    """

    thing: object
    _number: int

    def __new__(cls, thing: object) -> "Reference":
        number = next(_numbers)
        self = super().__new__(cls, _PICKLE % number)
        self.thing = thing
        self._number = number
        _things[number] = thing
        return self

    def __bytes__(self) -> "Reference":
        """Return itself: other bytes would not keep the object."""
        return self

    def __del__(self) -> None:
        _things.pop(self._number, None)


def resolve(number: int) -> object:
    """Return the object of a reference. Unpickling a Reference calls this."""
    return _things[number]


_PICKLE: Final = b"c" + __name__.encode() + b"\nresolve\n(I%d\ntR."


class Arrived:
    """A payload that has arrived. Implements `Received`."""

    __slots__ = ("_payload", "size")
    is_leased = False

    def __init__(self, payload: bytes) -> None:
        self._payload = payload
        self.size = 0 if type(payload) is Reference else len(payload)

    def load(self, loads: Callable[[Any], Any] = load, /) -> Any:
        """Return the object of a reference, or unpickle the bytes."""
        payload = self._payload
        return payload.thing if type(payload) is Reference else loads(payload)


class Whole:
    """A shared object that has arrived: the object itself. Implements `Received`."""

    __slots__ = ("_thing",)
    size = 0
    is_leased = False

    def __init__(self, thing: object) -> None:
        self._thing = thing

    def load(self, _loads: Callable[[Any], Any] = load, /) -> Any:
        return self._thing


class Handed:
    """The source of a handle that was passed to a call. It keeps the object, also when the program closes its handle."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def value(self) -> Any:
        return self._value

    def close(self) -> NoReturn:
        raise RuntimeError("a shared object can be closed only in the program that shared it, not in a worker")

    def travel(self) -> NoReturn:
        raise TypeError("a Shared that a thread has got cannot be pickled: pass it to a call of percore.current_runner()")

    def left(self) -> None:
        """Do nothing: nobody but the handle needs it."""

    def __str__(self) -> str:
        return "in a worker"


def _handed_on(part: Any) -> Any:
    """Return the arguments of a call, with a handle of its own in place of each handle of a shared object among them."""
    if type(part) is tuple and Shared in map(type, part):
        return tuple(map(_handed, part))
    if type(part) is dict and Shared in map(type, part.values()):
        return {name: _handed(value) for name, value in part.items()}
    return part


def _handed(value: Any) -> Any:
    return Shared(Handed(value.value)) if type(value) is Shared else value


class References:
    """Implements `Store`, and what the two sides of a channel share. A parcel is the number of a shared object."""

    room = most_shared = most_kept = most_functions = _PLENTY
    heaviest_batch = codec.HEAVIEST_BATCH
    has_objects = True
    lacks_room = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._parcels = count(1)
        self._kept: dict[int, object] = {}

    @property
    def in_use(self) -> int:
        return len(self._kept)

    # What crosses

    # Functions and not methods: without a GIL each call of a method counts the references to this object, which all threads share,
    # and so does each use of a global that is no function, class or small number.

    @staticmethod
    def passes(args: tuple[object, ...]) -> bool:
        return Shared not in map(type, args)

    @staticmethod
    def passes_value(value: object) -> bool:
        """Whether a result may be sent as it is: an awaitable may have to be awaited first."""
        return not hasattr(type(value), "__await__")

    def pickler(self) -> "References":
        return self

    def payload(self, obj: object) -> Payload:
        return self.pickled(obj)

    def pickled(self, obj: object) -> bytes:
        return Reference(tuple(map(_handed_on, obj)) if type(obj) is tuple else obj)

    def can_pickle(self, _obj: object) -> bool:
        return True

    def exception(self, error: BaseException, *, as_itself: bool) -> bytes:
        """Return an exception as it arrives on the other side. Its frames are the user's: percore's would keep the arguments."""
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith(_OWN):
            frames = frames.tb_next
        if frames is not None:
            error.__traceback__ = frames
        return Reference(passed_on(error, as_itself=as_itself))

    def received(self, payload: Payload) -> Arrived:
        """Read a payload.

        Raises:
            BrokenFrame: it is none.
        """
        return Arrived(self.read(payload))

    def read(self, payload: Payload) -> bytes:
        """Return the bytes of a payload.

        Raises:
            BrokenFrame: it is none.
        """
        if not isinstance(payload, bytes):
            raise BrokenFrame(f"a payload that is a {type(payload).__name__}")
        return payload

    # Parcels

    def keep(self, pickle: bytes) -> int:
        return self._keep(pickle)

    def _keep(self, thing: object) -> int:
        parcel = next(self._parcels)
        self._kept[parcel] = thing
        return parcel

    def adopt(self, pickle: memoryview | bytes) -> Payload:
        return bytes(pickle)

    def unplaced(self, parcel: int) -> Payload:
        return parcel

    def is_placed(self, _parcel: int) -> bool:
        return True

    def size(self, _parcel: int) -> int:
        return 0

    def discard(self, parcel: int) -> None:
        del self._kept[parcel]

    # Shared objects

    def share(self, obj: object, waiter: asyncio.Future[int]) -> None:
        if waiter.done():
            return
        parcel = self._keep(obj)
        if not settle(waiter, parcel):  # it was cancelled meanwhile
            self.discard(parcel)

    def load(self, parcel: int, ended: Callable[[], None]) -> Whole:
        return self.load_shared(self._loop, parcel, ended)

    def load_shared(self, loop: asyncio.AbstractEventLoop, parcel: int, ended: Callable[[], None]) -> Whole:
        """As `load`, with the loop that calls `ended`."""
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(ended)  # whoever has the object keeps it
        return Whole(self._kept[parcel])

    # Items of maps

    def weigh(self, _body: object) -> int | None:
        return _WEIGHT

    def weigh_rows(self, rows: list[Any]) -> tuple[int, bytes] | None:
        return None if Shared in map(type, rows) else (_WEIGHT, b"")

    def pack_items(self, function: int, bodies: list[Any], _data: bytes, *, is_bare: bool) -> Body:
        return function, bodies[:], is_bare  # the supervisor goes on using its list

    def unpack_items(self, body: Any) -> tuple[int, list[Any], bool]:
        """As `WorkerChannel.unpack_items`."""
        found: tuple[int, list[Any], bool] = body
        return found

    def pack_values(self, first: int, seconds: float, values: list[Any], pickled: list[int]) -> Body:
        """As `WorkerChannel.pack_values`."""
        return first, seconds, values, pickled

    def unpack_values(self, body: Any) -> tuple[int, float, list[Any], list[int]]:
        if type(body) is not tuple:
            raise BrokenFrame(f"results of a batch are {type(body).__name__}")
        found: tuple[int, float, list[Any], list[int]] = body
        return found


class Copies(References):
    """A store whose arguments and results are pickled as between processes. Shared objects are the objects themselves."""

    has_objects = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.passes = codec.is_inline  # type: ignore[method-assign]
        self.passes_value = codec.is_inline_value  # type: ignore[method-assign]
        self.can_pickle = partial(can_pickle, main_by_value=False)  # type: ignore[method-assign]

    def pickled(self, obj: object) -> bytes:
        file = MemoryFile()
        dump(obj, file, main_by_value=False)
        return bytes(file.data)

    def exception(self, error: BaseException, *, as_itself: bool) -> bytes:
        return bytes(dump_exception(error, MemoryFile, main_by_value=False, as_itself=as_itself).data)

    def weigh(self, body: object) -> int | None:
        return codec.weigh(body)

    def weigh_rows(self, rows: list[Any]) -> tuple[int, bytes] | None:
        weighed = codec.weigh_rows(rows)
        return None if weighed is None else (weighed[0], b"")
