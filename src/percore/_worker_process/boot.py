"""The start data of a worker process. The program imports this alone: the import of the other modules of a worker takes time."""

import signal
from typing import Any, Final, NamedTuple

from percore._protocol.worker_start import WorkerStart
from percore._transport.frames import Layout
from percore._worker_process import multiprocessing_state
from percore._worker_process.log_forwarding import Levels

ASK_SIGNAL: Final = signal.SIGWINCH
"""The signal that asks a worker for the stacks of its threads (`own_stacks`). A process that has no handler for it ignores it."""
STACKS_SIGNAL: Final = signal.SIGURG
"""The signal upon which faulthandler writes them, in a worker that has not answered. Likewise ignored without a handler."""
STACKS_NAME: Final = "percore-stacks"
"""What /proc shows of the file that it writes them to, so that `percore top` finds it."""


class Boot(NamedTuple):
    """What the supervisor sends to a worker process before the channel exists."""

    start: WorkerStart
    layout: Layout
    debug: bool
    main: tuple[Any, ...]
    loop_factory: bytes
    levels: Levels = (0, ())
    parent: multiprocessing_state.Parent = multiprocessing_state.Parent(0, "MainProcess", ())
    """The program, as multiprocessing knows it."""
    authkey: bytes = b""
    """multiprocessing's authentication key in the program."""
    has_tracker: bool = False
    """Whether there is a descriptor of the program's multiprocessing resource tracker."""
    sockets: int = 0
    """How many of the last descriptors are the sockets on which the worker serves."""
    harden: bool = False
    """Whether the process closes itself to others of its user, and renounces further rights."""
