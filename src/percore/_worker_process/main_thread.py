"""The main thread of a worker as the only thread of its pool, for an executor with `max_threads=1`.

`signal.signal` works in the main thread alone, and so do libraries that handle signals. ProcessPoolExecutor calls its functions
there. So does such a worker, and its event loop runs in a thread of its own:

    main thread      initializer ─▶ plain functions, one at a time ─────────────▶ exit functions
    percore-loop                      └▶ messages, coroutine functions, lifespan ─▶┘

Invariants:

- The loop runs at all times, whatever a plain function does. So handing back, cancelling, draining, closing and the detection of
  blocked workers are those of every other worker.
- One thread ends the process. When the loop has ended, no further call comes. If none is left, the main thread ends the process;
  otherwise the loop's thread does, without waiting for the call, as in every other worker.
- SIGTERM reaches the loop also while the main thread is in a long call of C code: the interpreter's own handler, which needs no
  GIL, writes the number of the signal to a pipe that the loop reads. If a call has taken that pipe away (`signal.set_wakeup_fd`),
  the handler in Python still tells the loop, between two instructions of the main thread.
- An exception in the main thread outside a call ends the process, since it may have lost a call. It can only come from a signal
  handler that a call has set, and ProcessPoolExecutor's worker ends by it, too.
"""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import NoReturn

from percore._worker.threads import started
from percore._worker.worker import WorkerCore
from percore._worker_process import after_fork


def serve(run_loop: Callable[[], int], worker: WorkerCore, leave: Callable[[int], NoReturn]) -> int:
    """Run plain functions in this thread and the loop in another until the loop has ended. Return the exit code.

    If the system starts no thread for the loop, the loop runs here, only to report that.

    Args:
        run_loop: runs the loop to its end and returns the exit code.
        worker: the worker.
        leave: ends the process with this exit code, if a call still runs here then.
    """
    codes: list[int] = []
    server = worker.server

    def run() -> None:
        code = 1
        try:
            code = run_loop()
        except BaseException:
            sys.excepthook(*sys.exc_info())
        codes.append(code)
        if not server.threads.is_idle():
            leave(code)
        server.threads.stop()
        SimpleQueue[None]().get()  # for ever: the main thread ends the process

    server.threads.use_main()
    try:
        started(threading.Thread(target=run, name="percore-loop", daemon=True))
    except RuntimeError as error:
        worker.fail(error)
        return run_loop()
    server.threads.work()
    return codes[0]


def drain_on_sigterm(loop: asyncio.AbstractEventLoop, drain: Callable[[], None]) -> Callable[[], None]:
    """Call `drain` in the loop for each SIGTERM, as `loop.add_signal_handler` does in the main thread.

    Call it in the main thread, and then what it returns in the loop.
    """
    read_end, write_end = os.pipe()
    for end in (read_end, write_end):
        os.set_blocking(end, False)
    after_fork.withhold_more((read_end, write_end))

    def handle(_signum: int, _frame: object) -> None:
        loop.call_soon_threadsafe(drain)

    def read() -> None:
        # A call may have replaced the handler; SIGTERM is its own then.
        if signal.SIGTERM in os.read(read_end, 4096) and signal.getsignal(signal.SIGTERM) is handle:
            drain()

    signal.signal(signal.SIGTERM, handle)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    after_fork.sigterm_drains()
    return lambda: loop.add_reader(read_end, read)
