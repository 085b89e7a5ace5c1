"""What supervisor and worker say to each other.

A message is a triple (op, id, body), marshalled in frames. `id` is a call's unless noted. A body that holds the user's data is

    a tuple     arguments that are all exact immutable scalars, as they are
    bytes       one pickle
    an int      one pickle in a slot of shared memory: length << SLOT_BITS | slot
"""

from typing import Final, TypeAlias

SLOT_BITS: Final = 10
SLOT_MASK: Final = (1 << SLOT_BITS) - 1

Payload: TypeAlias = bytes | int
Body: TypeAlias = object
Message: TypeAlias = tuple[int, int, Body]

# To a worker. A positive op is a call of the function of that number: body = its arguments.
DEFINE: Final = -1  # id: number of a function; body: (kind, payload)
UNDEFINE: Final = -2  # id: number of a function that no call will name again
CANCEL: Final = -3  # body, of a batch: the first item that is not wanted any more
RELEASE: Final = -4  # id: a result slot that has been read
RECALL: Final = -5  # id: how many calls that have not begun are wanted back; body: places of those that must stay, four bytes each
FINISH: Final = -6  # no more calls will come: leave the lifespan and end
ONCE_TASK: Final = -7  # a call whose function travels with its arguments: body = pickle of (fn, args, kwargs)
ONCE_THREAD: Final = -8
BATCH: Final = -9  # body: marshalled (number of the function, bodies of the items, whether each is its only argument, bare)
TERMS: Final = -10  # what the next message of this id is to be run under; body: (seconds or None, context or None, is_beside)
DRAIN: Final = -11  # take no more calls, hand back what has not begun, and end
FORGET: Final = -12  # id: number of a shared object that is to be given up

# To the supervisor.
VALUE: Final = 1  # body: the result, an immutable scalar
RESULT: Final = 2  # body: the result, pickled
ERROR: Final = 3  # body: a pickled exception
CANCELLED: Final = 4  # the call ended by the cancellation that was asked for
RETURNED: Final = 5  # it had not begun and never will here; body, of a batch: how many of its last items
UNPICKLED: Final = 6  # the call's arguments have been read from their slot
READY: Final = 7  # the lifespan is entered; body: the worker's pid
UNREADY: Final = 8  # the start failed; body: a pickled exception
DRAINING: Final = 9  # asked to end from outside: takes no more calls
VALUES: Final = 10  # of a batch; body: marshalled (first item, seconds they took, the results, immutable scalars)
TIMED_OUT: Final = 11  # a plain function has run for longer than it may; its thread runs on
LEASED: Final = 12  # id: 0; body: payload; arrays lie in its slot, which has to stay as it is; sent before an UNPICKLED
UNLEASED: Final = 13  # id: 0; body: a leased payload; the last array that lay there has gone
KNOWN: Final = 14  # id: number of a shared object that this worker has met
FORGOTTEN: Final = 15  # id: number of a shared object that nothing in this worker uses any more
FAILED: Final = 16  # the lifespan has failed while calls ran, and the worker ends; body: None, then a pickled exception


ITEM_SHIFT: Final = 48
ID_MASK: Final = (1 << ITEM_SHIFT) - 1
"""An item of a batch has the id of the batch, and above it its number in the batch, from 1."""


class Kind:
    """Where a call runs, and so which places it takes. Plain ints: they are looked at several times a call."""

    TASK: Final = 0
    THREAD: Final = 1
    BESIDE: Final = 2  # takes no place: a broadcast


ONCE_OPS: Final = (ONCE_TASK, ONCE_THREAD)
"""By kind: how a call is sent whose function has no number."""
