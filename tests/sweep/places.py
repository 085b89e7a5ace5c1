"""Every place where percore can be struck, and the deaths and states it is swept with."""

from typing import Final

STEPS: Final = (
    "worker.bell.read",
    "worker.call.marked",
    "worker.call.unpickled",
    "worker.call.running",
    "worker.outcome.ready",
    "worker.outcome.stored",
    "worker.frame.written",
    "worker.bell.rung",
    "worker.slot.filled",
    "worker.slot.released",
    "worker.item.ready",
)
"""Of a call, in its worker."""

BIRTHS: Final = ("worker.forked", "worker.hello", "worker.lifespan.entered", "worker.ready")
ENDS: Final = ("worker.draining", "worker.finished", "worker.lifespan.left", "worker.bye")

SERVER: Final = ("forkserver.request", "forkserver.forked", "forkserver.born", "forkserver.reaped")

SUPERVISOR_STEPS: Final = (
    "supervisor.call.pickled",
    "supervisor.call.stored",
    "supervisor.slot.filled",
    "supervisor.frame.written",
    "supervisor.bell.rung",
    "supervisor.bell.read",
    "supervisor.call.released",
    "supervisor.outcome.delivered",
    "supervisor.slot.released",
)
SUPERVISOR_LIFE: Final = (
    "supervisor.worker.started",
    "supervisor.worker.ready",
    "supervisor.worker.draining",
    "supervisor.worker.exited",
    "supervisor.worker.buried",
)

CHANGES: Final = ("supervisor.renewal.due", "supervisor.worker.succeeded", "supervisor.pool.grown", "supervisor.pool.shrunk")
"""Of a reload or a resize."""

NESTED: Final = ("worker.nested.asked", "supervisor.nested.asked", "supervisor.nested.accepted", "supervisor.nested.answered")
"""Of a call that another call makes."""

OF_THREADS: Final = (
    "worker.call.marked",
    "worker.call.unpickled",
    "worker.call.running",
    "worker.outcome.ready",
    "worker.item.ready",
    "worker.nested.asked",
)
"""Of a call, in a worker that is a thread."""

ALL: Final = (*CHANGES, *NESTED, *STEPS, *BIRTHS, *ENDS, *SERVER, *SUPERVISOR_STEPS, *SUPERVISOR_LIFE)

DEATHS: Final = {"kill": -9, "segv": -11, "abrt": -6, "exit": 0, "libcexit": 0}
"""Ways to die, and the exit code of each."""

IMPOSSIBLE: Final = {
    ("supervisor.call.stored", "slots"): "when a call is submitted it gets a slot only while half of them are free",
    **dict.fromkeys(
        ((f"{side}.slot.filled", state) for side in ("worker", "supervisor") for state in ("idle", "busy", "full")),
        "a payload waits for a slot only where others have them",
    ),
    **dict.fromkeys(
        ((place, state) for place in NESTED[1:] for state in ("full", "slots")),
        "workers that read nothing begin no call that would make calls",
    ),
    ("supervisor.nested.answered", "idle"): "a call that is answered and its caller are two",
}
"""Places that are not passed in that state, and why."""

STATES: Final = ("idle", "busy", "full", "slots")
"""One call at a time; many; more outcomes (or arguments) than the ring takes; no slot free."""
