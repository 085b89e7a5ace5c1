"""The seam between the supervisor and the engines that run its workers, in one file of protocols.

An engine starts workers, carries messages and keeps payloads, and reports when a worker has ended. It makes no decisions. The
supervisor knows of a worker only what is written here: not where it runs, and not how its bytes travel.

    Engine ── starts ──▶ Worker ── has ──▶ Channel      messages in order, each exactly once, until the channel breaks
       └────── has ────▶ Store                          payloads: pickled once, kept until discarded, named by a number

The body of a call is a tuple of values that `Store.passes`, a pickle as bytes, or a parcel: the number of a pickle in the store.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from percore._monitor.usage import ProcessUsage, Usage
    from percore._protocol.messages import Body, Message, Payload

    Send = Callable[[int, int, Body], None]

# Payloads


class Received(Protocol):
    """A payload that has arrived. It can be unpickled once.

    Attributes:
        size: the size of the payload in bytes.
        is_leased: whether objects of this process use the payload's memory after `load`. Then `Channel.release` is not called: the
            channel releases the payload itself when the last of these objects has gone.
    """

    size: int
    is_leased: bool

    def load(self, loads: Callable[[Any], Any] = ..., /) -> Any:
        """Unpickle the payload and return the object. `loads` unpickles payloads without buffers.

        Raises:
            BaseException: any exception that the user's code raises in unpickling.
        """


class ObjectPickler(Protocol):
    """A pickler, for one object."""

    @property
    def lacks_room(self) -> bool:
        """Whether the pickling failed for lack of memory."""

    def payload(self, obj: object) -> Payload:
        """Pickle `obj`. Return the bytes if they fit into a message, else the parcel, which the caller must discard.

        Raises:
            PayloadTooLarge: the pickle exceeds the limit of the runner.
            PicklingError, AttributeError, TypeError: the object cannot be pickled.
            BaseException: any exception of the user code that pickling runs.
        """


class Store(Protocol):
    """Keeps payloads that are too large for a message until they are discarded. One store serves all workers of a runner.

    Attributes:
        room: how many pickles `keep` keeps at a time.
        most_shared: how many objects may be shared at a time.
        most_kept: how many shared objects it may keep, closed ones to which views still refer included.
        most_functions: how many functions may have parcels of their own. The pickle of any other is part of each call.
        in_use: how many parcels it keeps.
        heaviest_batch: the weight that the items of a batch may have together.
        has_objects: whether arguments that pass as they are may be of any size, so that a call lets go of them when it has ended.
    """

    has_objects: bool
    room: int
    most_shared: int
    most_kept: int
    most_functions: int
    heaviest_batch: int

    @property
    def in_use(self) -> int: ...

    def passes(self, args: tuple[object, ...], /) -> bool:
        """Whether these arguments may be sent as they are."""

    def pickler(self) -> ObjectPickler:
        """Return a pickler for the next object."""

    def pickled(self, obj: object) -> bytes:
        """Pickle `obj` into bytes of any size. Raises as `ObjectPickler.payload`."""

    def can_pickle(self, obj: object) -> bool:
        """Whether `ObjectPickler.payload` could pickle `obj`. This keeps nothing."""

    def keep(self, pickle: bytes, /) -> int:
        """Keep a pickle that another store has made, and return its parcel, which is placed.

        Raises:
            RuntimeError: there is no room. This cannot happen while nothing but `keep` uses the store, for at most `room` pickles.
        """

    def adopt(self, pickle: memoryview | bytes, /) -> Payload:
        """Keep a pickle that a worker has made, to pass it on. Return it as bytes if it fits into a message, else its parcel.

        There is always room for it, because the parcel need not be placed. The caller must discard it.
        """

    def unplaced(self, parcel: int) -> Payload:
        """Make room, if there is little, for other parcels: return this pickle as another parcel, or as bytes, instead of this one.

        To be called for a parcel that a worker has read, and that may have to be sent again. The parcel may stay as it is.
        """

    def is_placed(self, parcel: int) -> bool:
        """Whether `Channel.send_parcel` can send this parcel now, without waiting for room."""

    def size(self, parcel: int) -> int:
        """Return the size of a parcel in bytes."""

    def discard(self, parcel: int) -> None:
        """Release a parcel. Workers that still use it keep what they need of it."""

    def share(self, obj: object, waiter: asyncio.Future[int]) -> None:
        """Keep an object where every worker can read it, and end `waiter` in the loop with its placed parcel or with the error.

        If `waiter` is done by then, keep nothing.
        """

    def load(self, parcel: int, ended: Callable[[], None], /) -> Received:
        """Read a shared object in this process, read-only.

        The loop calls `ended` once: when the last view of it is gone, or soon if this raises.
        """

    # Items of maps, several of which travel in the body of one BATCH, and their results in that of a VALUES

    def weigh(self, body: object, /) -> int | None:
        """Return the weight in a batch of an item with this body. None: it is too heavy for one."""

    def weigh_rows(self, rows: list[Any], /) -> tuple[int, bytes] | None:
        """Return the weight of the heaviest of these values, each of which is the only argument of its call.

        With it comes an encoding in which each value takes as many bytes as it weighs, or no bytes. None: not all of them pass.
        """

    def pack_items(self, function: int, bodies: list[Any], data: bytes, *, is_bare: bool) -> Body:
        """Return the body of a BATCH.

        Args:
            function: the number of the function.
            bodies: the bodies of the items; of a bare item, its only argument.
            data: their encoding by `weigh_rows`, or no bytes.
            is_bare: whether the items are bare.
        """

    def unpack_values(self, body: Any, /) -> tuple[int, float, list[Any], list[int]]:
        """Return the contents of a VALUES: see `WorkerChannel.pack_values`.

        Raises:
            BrokenFrame: the body is of another kind.
        """


# Messages


class Ticket(Protocol):
    """The owner of a parcel that is being sent."""

    def is_wanted(self) -> bool:
        """Whether the parcel still has to be sent."""

    def stored(self, parcel: int) -> bool:
        """Take over the parcel that is about to be sent, which replaces the one given to `send_parcel` and may be the same.

        Return False if it is no longer wanted. The channel then sends nothing, and discards the parcel if it is another one.
        """


class Side(Protocol):
    """What the two sides of a channel have in common.

    Attributes:
        is_open: whether it receives.
    """

    is_open: bool

    @property
    def own(self) -> Mapping[int, Callable[[int, Any], None]]:
        """Handlers of the messages between the two sides of the channel itself, by op."""

    def send(self, op: int, call_id: int, body: Body) -> None:
        """Send a message, at the end of this iteration of the loop or earlier."""

    def load(self, payload: Payload, /) -> Received:
        """Read a payload that the other side has sent.

        Raises:
            BrokenFrame: there is no such payload.
        """


class Channel(Side, Protocol):
    """The supervisor's side of a channel to one worker. Only the loop's thread uses it."""

    @property
    def waits_since(self) -> float:
        """While the worker has unread messages, the time (`time.monotonic`) since which it has read nothing; 0 if it has read all.

        Choosing a worker for a call looks at several workers, so an engine may keep it as a plain attribute.
        """

    @property
    def sent(self) -> int:
        """How much was sent, in bytes or in messages."""

    @property
    def received(self) -> int:
        """How much was received and read, in the same unit."""

    def open(
        self,
        on_frame: Callable[[Iterable[Message]], None],
        on_broken: Callable[[BaseException], None],
        on_batch: Callable[[], None],
    ) -> None:
        """Begin to receive.

        The channel calls `on_frame` with messages, until a call stops the channel; `on_broken` with the exception if the channel
        breaks; and `on_batch` after everything that arrived together was delivered, and when the worker has read what it was sent.
        """

    def send_parcel(self, op: int, call_id: int, parcel: int, ticket: Ticket) -> None:
        """Send a message whose body is a parcel.

        A parcel that is placed (`Store.is_placed`) is sent now, in order with all other messages. Another one is sent when there is
        room for it, and later messages may overtake it.
        """

    def read(self, payload: Payload, /) -> memoryview | bytes:
        """Return the bytes of a payload that the worker has sent, to pass them on. Do not use them after `release`.

        Raises:
            BrokenFrame: there is no such payload.
        """

    def release(self, payload: Payload) -> None:
        """Tell the worker that a payload it has sent is not needed any more."""

    def receive(self) -> None:
        """Deliver everything that has arrived. Called once a worker has ended, for its last messages."""

    def catch_up(self) -> None:
        """Do what the loop was to do soon: it may have lost that, if an exception such as a Ctrl-C came just before a callback."""

    def has_read(self) -> bool:
        """Whether the worker has read everything sent. If not, `on_batch` is called when it has."""

    def lag(self) -> float:
        """Seconds the worker took to read the last message, or, if it has not yet, at least the time since then."""


class WorkerChannel(Side, Protocol):
    """The worker's side of a channel.

    Any thread may call `load`, `load_shared`, `flush`, `keep`, `pickled`, `send_from_thread`, the picklers, and `send_payload` and
    `send_exception` with one of these methods as their `send`. All other methods may be called on the loop only.

    Attributes:
        on_batch: called after everything that arrived together was delivered, and when the supervisor has read what it was sent.
    """

    on_batch: Callable[[], None] | None

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def open(self, on_frame: Callable[[Iterable[Message]], None], on_broken: Callable[[BaseException], None]) -> None:
        """Begin to receive, as `Channel.open`."""

    def send_later(self, op: int, call_id: int, body: Body) -> None:
        """Send a message at the end of this iteration of the loop."""

    def send_from_thread(self, op: int, call_id: int, body: Body) -> None:
        """Send a message now."""

    def keep(self, op: int, call_id: int, body: Body) -> None:
        """Send a message together with the next one, or with the next `flush`.

        The channel flushes after it has delivered what has arrived.
        """

    def send_payload(
        self, op: int, call_id: int, body: Body, send: Send | None = None, sent: Callable[[], None] | None = None
    ) -> None:
        """Send a message with a payload or a pickle of any size by the method `send`, now or when there is room for it.

        `sent` is called once the message is sent, in any thread, perhaps during this call. Messages sent from then on come later.
        """

    def send_exception(
        self, op: int, call_id: int, error: BaseException, send: Send | None = None, *, as_itself: bool = False
    ) -> None:
        """Send a message with an exception by the method `send`. `as_itself`: as for `dump_exception`."""

    def flush(self) -> None:
        """Send all messages that wait for others."""

    def is_flushed(self) -> bool:
        """Whether everything was sent. Call it while no thread sends."""

    def passes(self, value: object, /) -> bool:
        """Whether this result may be sent as it is."""

    def pickler(self) -> ObjectPickler:
        """Return a pickler for the next object. The channel discards its payload once the supervisor has released it."""

    def pickled(self, obj: object) -> bytes:
        """Pickle `obj` into bytes of any size. Raises as `ObjectPickler.payload`."""

    def read(self, payload: Payload, /) -> memoryview | bytes:
        """Return the bytes of a payload, as `Channel.read`. `load` takes a copy of them."""

    def load_shared(self, parcel: int, ended: Callable[[], None], /) -> Received:
        """Read a shared object, as `Store.load`."""

    def unpack_items(self, body: Any, /) -> tuple[int, list[Any], bool]:
        """Return the contents of a BATCH: the number of the function, the bodies of the items, and whether they are bare."""

    def pack_values(self, first: int, seconds: float, values: list[Any], pickled: list[int]) -> Body | None:
        """Return the body of a VALUES, or None if it is too large.

        Args:
            first: the number of the first item.
            seconds: how long the items took; negative if that is unknown.
            values: the results of this item and the following ones.
            pickled: the indexes of those that are pickles.
        """


# Workers


class Fate(NamedTuple):
    """How far a call has come in its worker.

    Attributes:
        begun: whether it has begun. None: nobody can tell; then it counts as begun.
        age: seconds since it began; None if it has not, or if nobody can tell.
        items: for a batch, how many of its items have begun.
    """

    begun: bool | None
    age: float | None = None
    items: int = 0


UNBEGUN = Fate(begun=False)


class Exit(NamedTuple):
    """The end of a worker.

    Attributes:
        code: its exit code, as subprocess defines it; None if unknown.
        why: more about the end, where the engine knows it, as a clause: "its node was lost".
        place_lost: whether the worker ended because the place where it ran was lost. Such an end is no failed start.
        peak: the most bytes of memory that it had in use at a time, with shared memory; None if unknown.
        is_given_up: whether the worker still runs user code, because it cannot be killed. Nothing of it arrives any more.
        report: the traceback of a helper of the engine which was to start the worker; empty if there is none.
    """

    code: int | None
    why: str = ""
    place_lost: bool = False
    peak: int | None = None
    is_given_up: bool = False
    report: str = ""


class Condition(NamedTuple):
    """What an engine finds out about a worker that reads nothing.

    Attributes:
        obstacle: why the worker does not run, as a clause, with figures in parentheses at its end: "its process is stopped". Empty:
            it runs, or nobody can tell.
        stacks: the stacks of all its threads, as faulthandler writes them. Empty: unknown.
        call: the id of the call whose code runs in the loop. It may have ended. None: unknown, or no call's.
        frame: the name of the function that runs in the loop or keeps it from running: the outermost one of the user's. Empty:
            unknown.
    """

    obstacle: str = ""
    stacks: str = ""
    call: int | None = None
    frame: str = ""


class Worker(Protocol):
    """A running worker.

    Attributes:
        node: the name of its node; None where workers run on the program's own machine.
    """

    @property
    def node(self) -> str | None: ...

    @property
    def channel(self) -> Channel: ...

    @property
    def pid(self) -> int | None:
        """The process id where the worker runs. None: unknown yet, or the worker is no process."""

    @property
    def thread_ids(self) -> tuple[int, ...]:
        """The system's ids of the worker's threads, if they are the program's; else empty. Any thread may read it."""

    def ready(self, told: Body) -> None:
        """Note that the worker has reported that it is ready. `told`: the body of the message."""

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send a signal. Once the worker has ended, do nothing."""

    def fate(self, call_id: int) -> Fate:
        """Return how far a call has come. Call it before `close`.

        While the worker lives, the answer may be out of date: use it for statistics, not for decisions. There is one exception. A
        worker sets a call's start mark first, and then begins the call only if the time given with it (BEGIN_BY, TERMS) is not
        over. So once that time is over by some milliseconds, an answer that the call has not begun is final. The time is one of the
        monotonic clock of the supervisor's machine: an engine whose workers have another clock has to translate it. An engine that
        cannot read the marks of a living worker answers None.
        """

    def examine(self, told: Callable[[Condition], None]) -> None:
        """Find out why the worker reads nothing, and call `told` in the loop within seconds.

        It is not called if the worker is closed before.
        """

    def close(self) -> None:
        """Release the channel and everything else that belongs to this worker. Idempotent."""


class Engine(Protocol):
    """Starts workers.

    Attributes:
        store: the store of all its workers.
        sees_starts: whether `Worker.fate` knows of the calls of a living worker whether they have begun.
        on_place: the engine calls it, from the loop and never during `start`, when there may be a place for a worker again after
            `start` has returned None. The pool sets it.
        no_place: why there is no place, if the engine knows more; otherwise empty.
    """

    on_place: Callable[[], None]
    no_place: str
    sees_starts: bool

    @property
    def store(self) -> Store: ...

    def start(
        self, index: int, generation: int, on_exit: Callable[[Exit], None], sockets: Sequence[socket.socket]
    ) -> Worker | None:
        """Start a worker and return at once. The worker reports that it is ready by a message.

        The worker gets copies of `sockets`, which listen. The caller may close its own after this call.

        Return None if there is no place for the worker yet. The pool asks again once the engine has called `on_place`.

        The engine calls `on_exit` once, from the loop and never during this call, when the worker has ended. It may call it once
        more if a KeyboardInterrupt has ended the first call.

        Raises:
            OSError: the worker could not be started; nothing is left behind.
        """

    @property
    def rouse(self) -> Callable[[], object] | None:
        """A function that wakes those workers that are threads of this process and sleep: see `_supervisor.reclaiming`.

        It is called from the loop. None: the loop itself never sleeps, because its time is virtual.
        """

    def renew(self) -> None:
        """Start the next workers with all modules as they are now, and not from a process that has imported earlier versions."""

    def resize(self, workers: int) -> None:
        """Note how many workers the runner wants from now on. Workers started later share resources by this number.

        Raises:
            OSError: there is not enough address space for so many. Nothing has changed.
        """

    async def usage(self, workers: Sequence[tuple[str, Worker]]) -> Usage:
        """Return what this process, the engine's own processes and these workers use. Each worker comes with its role."""

    async def usage_elsewhere(self, workers: Sequence[tuple[str, Worker]]) -> Sequence[ProcessUsage]:
        """Return what those of these workers use that have a node. Each worker comes with its role, which its record has, too.

        Raises:
            Exception: nothing can be read now.
        """

    async def memory(self, workers: Sequence[Worker], enough: int) -> list[int | None]:
        """Return how many bytes of memory each of these workers has for itself: what becomes free when it ends.

        A figure of at most `enough` may include memory that workers share. None: the worker has ended, or nobody can tell. Reading
        must not take the loop's time.

        Raises:
            Exception: nothing can be read now.
        """

    async def aclose(self) -> None:
        """Release the store and everything that the workers shared. All workers must have ended and been closed."""
