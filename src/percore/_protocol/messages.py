"""The messages between supervisor and worker.

A message is a triple (op, id, body), marshalled in frames. `id` is the id of a call unless noted. A body with the user's data is

    a tuple     the arguments themselves, if all are exact immutable scalars
    bytes       one pickle
    an int      a parcel: one pickle that the store and the channel find by this number

A worker says one thing without a message: its start marks tell which calls have begun. They outlive the worker, so its engine can
tell how far each call was. A call's mark has MARK_WORDS words from index `place * MARK_WORDS` on, where the place is the call's id
modulo the number of places:

    the call's id, written last: it makes the mark valid
    when the call began, in nanoseconds of the monotonic clock
    for a batch, how many of its items have begun
"""

from typing import Final, Protocol, TypeAlias

Payload: TypeAlias = bytes | int
Body: TypeAlias = object
Message: TypeAlias = tuple[int, int, Body]


class BrokenFrame(Exception):
    """The peer sent invalid data. It is broken, and nothing more from it can be trusted."""


# To a worker. A positive op calls the function with that number; body: the arguments.
DEFINE_TASK: Final = -1  # id: number of a coroutine function that later calls name; body: its pickle
UNDEFINE: Final = -2  # id: number of a function that no later call will use
CANCEL: Final = -3  # body, for a batch: the first item that is no longer wanted. A stream closes its generator
RELEASE: Final = -4  # id: a result slot that has been read
RECALL: Final = -5  # id: how many calls that have not begun to hand back; body: places of the calls that must stay, four bytes each
FINISH: Final = -6  # no more calls will come: leave the lifespan and end
ONCE_TASK: Final = -7  # a call that brings its function along, to run as a task; body: pickle of (fn, args, kwargs)
ONCE_THREAD: Final = -8  # as ONCE_TASK, to run in a thread
BATCH: Final = -9  # several items of a map; body: from `Store.pack_items`
TERMS: Final = -10  # for the next message with this id; body: `Terms` of percore._worker.terms, as a tuple
DRAIN: Final = -11  # take no more calls, hand back those that have not begun, and end
FORGET: Final = -12  # id: number of a shared object that the worker must release
SHARE: Final = -13  # id: number of a shared object that later calls refer to; body: its parcel
DEFINE_THREAD: Final = -14  # as DEFINE_TASK, for a plain function
CREDIT: Final = -15  # id: a stream; body: how many more items it may produce
BEGIN_BY: Final = -16  # id: 0; body: the monotonic time by which the next calls must begin, or None; not for batches and parcels
TIMEOUT: Final = -18  # id: 0; body: how many seconds the next calls may run, or None; not for batches, parcels, calls with TERMS
WITHDRAW: Final = -17  # hand this call back if it has not begun
# Answers to ASK. id: number of the nested call
ANSWER_VALUE: Final = -20  # body: the result, an immutable scalar
ANSWER_RESULT: Final = -21  # body: the result, pickled
ANSWER_ERROR: Final = -22  # body: a pickled exception
ANSWER_ITEMS: Final = -23  # the next items of a stream; body: the values, and the indexes of those that are pickles
ANSWER_ITEM: Final = -24  # the next item of a stream, pickled; it is read (TAKEN) before another answer about this stream follows

# To the supervisor.
VALUE: Final = 1  # body: the result, an immutable scalar
RESULT: Final = 2  # body: the result, pickled
ERROR: Final = 3  # body: a pickled exception
CANCELLED: Final = 4  # the call ended by the requested cancellation; body: True if it had not begun, else None
RETURNED: Final = 5  # the call had not begun, and will not begin in this worker; body, for a batch: how many of its last items
UNPICKLED: Final = 6  # the call's arguments have been read from their slot
READY: Final = 7  # the lifespan is entered; body: the worker's pid
UNREADY: Final = 8  # the start failed; body: a pickled exception
DRAINING: Final = 9  # the worker takes no more calls and will end: after SIGTERM, its limit of calls, or DRAIN
VALUES: Final = 10  # results of consecutive items of a batch; body: from `WorkerChannel.pack_values`
TIMED_OUT: Final = 11  # a plain function has exceeded its timeout; its thread runs on
LEASED: Final = 12  # id: 0; body: a payload whose slot holds arrays in use and must stay unchanged; sent before an UNPICKLED
UNLEASED: Final = 13  # id: 0; body: a leased payload; the last array in its slot has gone
FORGOTTEN: Final = 15  # id: number of a shared object that nothing in this worker uses any more
FAILED: Final = 16  # the lifespan failed while calls ran, and the worker ends; body: None, then a pickled exception
ITEMS: Final = 17  # the next items of a stream; body: from `WorkerChannel.pack_values`
ITEM: Final = 18  # the next item of a stream; body: its pickle
ENDED: Final = 19  # the generator of a stream has returned
STARTED: Final = 20  # the call begins now; only if its TERMS ask for it
MEASURED: Final = 21  # id: 0; body: what was measured of a function's calls, see percore._worker.sampling
HOLDING: Final = 28  # id: 0; body: whether plain calls have not begun although there are threads for them, because others compute
# Nested calls, which calls in this worker make. id: number of the nested call, given by the worker
ASK: Final = 22  # make a call; body: a NestedRequest as a tuple
ASKED: Final = 23  # body: the pickle that was too large for ASK
DROP: Final = 24  # the call is no longer wanted; no answer follows
TAKEN: Final = 25  # the answer has been read from its slot
GRANT: Final = 26  # a stream; body: how many items the consumer has taken since the last GRANT
CLOSE: Final = 27  # a stream: close its generator; its end is answered


PICKLED: Final = frozenset({RESULT, ERROR, UNREADY, FAILED, ITEM, ASKED})
"""The messages to the supervisor whose body is a payload (or None: there is none). Parcels to a worker pass `send_parcel` alone."""

_WITH_PARCEL: Final = frozenset(
    {DEFINE_TASK, DEFINE_THREAD, ONCE_TASK, ONCE_THREAD, SHARE, ANSWER_RESULT, ANSWER_ERROR, ANSWER_ITEM}
)


def takes_parcel(op: int) -> bool:
    """Whether the body of such a message to a worker may be a parcel."""
    return op > 0 or op in _WITH_PARCEL


ITEM_SHIFT: Final = 48
ID_MASK: Final = (1 << ITEM_SHIFT) - 1
"""The id of an item of a batch: the batch's id in the low bits and the item's number, from 1, above them."""


class Kind:
    """Where a call runs, and thus which kind of place it takes. Plain ints, because every call compares them several times."""

    TASK: Final = 0
    THREAD: Final = 1
    BROADCAST: Final = 2  # it takes no place


ONCE_OPS: Final = (ONCE_TASK, ONCE_THREAD)
"""By kind: the op of a call whose function has no number."""

DEFINE_OPS: Final = (DEFINE_TASK, DEFINE_THREAD)
"""By kind: the op that gives a function its number."""


def is_call(op: int) -> bool:
    """Whether a message to a worker makes a call."""
    return op > 0 or op in ONCE_OPS or op == BATCH


MARK_WORDS: Final = 3


class StartMarks(Protocol):
    """The marks of one worker: unsigned words of 64 bits, such as a memoryview of shared memory."""

    def __len__(self) -> int: ...
    def __getitem__(self, word: int, /) -> int: ...
    def __setitem__(self, word: int, value: int, /) -> None: ...


def pid_told(told: Body) -> int:
    """Return the pid that a worker has sent.

    Raises:
        BrokenFrame: it is none.
    """
    if type(told) is not int or told <= 0:
        raise BrokenFrame(f"a worker is ready without a pid: {type(told).__name__}")
    return told
