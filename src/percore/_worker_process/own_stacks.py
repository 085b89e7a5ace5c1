"""A worker's answer to whoever asks for the stacks of its threads: it writes them between two steps of its main thread.

faulthandler's handler, which writes at once, looks at the frames of threads that run on: in a busy worker it has crashed one time
in some hundred. So others ask with ASK_SIGNAL first. faulthandler is for workers that do not answer, because C code holds the GIL
or the main thread: then their frames hardly change.
"""

import os
import signal
import sys
from contextlib import suppress
from threading import get_ident
from types import FrameType

from percore._worker.context import of_id
from percore._worker_process import stacks_file
from percore._worker_process.boot import ASK_SIGNAL


def answer(fd: int) -> list[int]:
    """From now on write stacks to this file whenever ASK_SIGNAL comes while somebody has the file.

    A terminal sends the same signal when it is resized, and nobody has the file then. Return the descriptors that are used for
    this, and that forks must close.
    """
    if not stacks_file.HAS_LOCKS:
        return []
    try:
        # The program's locks are on the description that it shares with its workers: only from another one they can be seen.
        own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # there is no /proc, so nobody can find the file
        return []

    pid = os.getpid()

    def write(_: int, frame: FrameType | None) -> None:
        if os.getpid() == pid and stacks_file.is_taken(own):  # a fork has closed both
            with suppress(OSError):  # the system has no memory left
                text = stacks_file.with_call(of_id.get(), stacks_text(frame))  # this runs in the context of the step
                os.write(fd, text.encode(errors="replace"))

    signal.signal(ASK_SIGNAL, write)
    return [own]


def stacks_text(own: FrameType | None) -> str:
    """Return the stacks of all threads as faulthandler writes them. `own`: where this thread was."""
    here = get_ident()
    threads = {ident: frame for ident, frame in sys._current_frames().items() if ident != here}
    parts = [_thread(f"Thread 0x{ident:016x}", frame) for ident, frame in threads.items()]
    return "\n\n".join([*parts, _thread(f"Current thread 0x{here:016x}", own)]) + "\n"


def _thread(name: str, frame: FrameType | None) -> str:
    lines = [f"{name} (most recent call first):"]
    while frame is not None:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        frame = frame.f_back
    return "\n".join(lines)
