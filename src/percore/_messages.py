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
CANCEL: Final = -3
RELEASE: Final = -4  # id: a result slot that has been read
RECALL: Final = -5  # id: how many calls that have not begun are wanted back
FINISH: Final = -6  # no more calls will come: leave the lifespan and end
ONCE_TASK: Final = -7  # a call whose function travels with its arguments: body = pickle of (fn, args, kwargs)
ONCE_THREAD: Final = -8

# To the supervisor.
VALUE: Final = 1  # body: the result, an immutable scalar
RESULT: Final = 2  # body: the result, pickled
ERROR: Final = 3  # body: a pickled exception
CANCELLED: Final = 4  # the call ended by the cancellation that was asked for
RETURNED: Final = 5  # the call had not begun and never will here
UNPICKLED: Final = 6  # the call's arguments have been read from their slot
READY: Final = 7  # the lifespan is entered; body: the worker's pid
UNREADY: Final = 8  # the start failed; body: a pickled exception
DRAINING: Final = 9  # asked to end from outside: takes no more calls


class Kind:
    """Where a call runs, and so which places it takes. Plain ints: they are looked at several times a call."""

    TASK: Final = 0
    THREAD: Final = 1


ONCE_OPS: Final = (ONCE_TASK, ONCE_THREAD)
"""By kind: how a call is sent whose function has no number."""
