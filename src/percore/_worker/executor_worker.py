"""How a worker of an executor differs from a worker of a Runner, to match the standard library's executors.

Exceptions   Exceptions of every class arrive unchanged, and so do those raised when a result is pickled.
Initializer  It runs before the worker reports that it is ready, and before the worker's loop runs, so it may run a loop itself. If
             multiprocessing starts the process, `initargs` come with the process, so they may contain multiprocessing's locks and
             queues.
Limit        After `max_tasks` calls the worker begins no other call, hands back the rest, and ends with the last one.
Pool         With broken="pool", a call that cannot be unpickled ends the worker. So does SIGTERM.
"""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

from percore._common.errors import ThreadInitializerFailed
from percore._protocol.messages import ERROR, Body
from percore._serialization.advice import advise_call, unpicklable
from percore._serialization.pickler import load
from percore._worker.answers import Answers, Send, Unpacked, WorkerFunction
from percore._worker.sampling import Sampler

if TYPE_CHECKING:
    from percore._protocol.interfaces import WorkerChannel
    from percore._protocol.worker_start import Given

logger: Final = logging.getLogger("concurrent.futures")
"""The logger to which the standard library reports a failed initializer."""


def initialize(pickled: bytes, given: "Given | None" = None) -> BaseException | None:
    """Run the initializer of an executor, if it has one. Return the exception that it raised, or None. Runs user code.

    `pickled`: the initializer and its arguments; empty if there is none, or if it is `given`.
    """
    try:
        initializer, initargs = given or (cast("Given", load(pickled)) if pickled else (None, ()))
        if initializer is not None:
            initializer(*initargs)
    except BaseException as error:
        logger.critical("Exception in initializer:", exc_info=True)
        return error
    return None


class ThreadStart:
    """The thread initializer of an executor, with its arguments."""

    def __init__(self, initializer: Callable[..., object], initargs: tuple[Any, ...]) -> None:
        self._initializer = initializer
        self._initargs = initargs

    def __call__(self) -> None:
        try:
            self._initializer(*self._initargs)
        except BaseException as error:
            logger.critical("Exception in initializer:", exc_info=True)
            raise ThreadInitializerFailed("the thread_initializer failed") from error


class ExecutorAnswers(Answers):
    """Answers calls as the standard library's workers do."""

    def __init__(self, channel: "WorkerChannel", sampler: Sampler | None = None, *, is_pool: bool) -> None:
        super().__init__(channel, sampler)
        self._is_pool = is_pool

    def unpack(self, call_id: int, function: WorkerFunction | None, body: Body, send: Send) -> Unpacked:
        """Like `Answers.unpack`, but in a pool a failure ends this process."""
        try:
            return super().unpack(call_id, function, body, send)
        except BaseException:
            if self._is_pool:
                _die()
            raise

    def error(self, call_id: int, error: BaseException, send: Send) -> None:
        """Send an exception of any class, unchanged."""
        advise_call(error)
        self._channel.send_exception(ERROR, call_id, error, send, as_itself=True)

    def _refused(self, value: object, error: BaseException) -> BaseException:
        error.add_note(unpicklable(value, error).text)
        return error


def run_chunk(fn: Callable[..., Any], chunk: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Call `fn` for each item of a chunk and return the results, for `map(chunksize=...)`. The first exception propagates."""
    return [fn(*args) for args in chunk]


def _die() -> NoReturn:
    """End the process at once, as a multiprocessing process does that cannot unpickle a message."""
    try:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        os._exit(1)
