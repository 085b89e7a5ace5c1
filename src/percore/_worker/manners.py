"""What a worker of an executor does otherwise than one of a Runner: as the standard library's executors promise.

Exceptions   of every class arrive as themselves, and so does what pickling a result raised.
Initializer  It has run before the worker tells that it is ready, and before its loop runs: it may run one of its own. `initargs`
             come with the process where multiprocessing starts it, so that its locks and queues can be among them.
Limit        After so many calls the worker begins no other, hands the rest back, and ends with the last one.
Pool         With broken="pool": a call that cannot be unpickled ends the worker, and SIGTERM does, too.
"""

import logging
import os
import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple, NoReturn

from percore._errors import PercoreError
from percore._ipc.advice import unpicklable
from percore._ipc.channel import Channel
from percore._ipc.exceptions import dump_exception
from percore._ipc.pickles import load
from percore._ipc.slots import Sink
from percore._messages import ERROR, Body
from percore._worker.answers import Answers, Function, Send

logger: Final = logging.getLogger("concurrent.futures")
"""Where the standard library tells of an initializer that failed."""

Given = tuple[Callable[..., object] | None, tuple[Any, ...]]

of_process: list[Given] = []
"""Initializer and its arguments, where they came with the process."""


class Manners(NamedTuple):
    """As the supervisor tells them.

    Attributes:
        is_pool: what cannot be unpickled ends the worker, and SIGTERM does.
        max_tasks: calls after which it begins no other; 0: no limit.
        has_main: multiprocessing has seen to the `__main__` of this process.
        initializer: pickled initializer and arguments; empty: there is none, or it came with the process.
    """

    is_pool: bool
    max_tasks: int
    has_main: bool
    initializer: bytes


def initialize(manners: Manners) -> BaseException | None:
    """Run the initializer. What it raised, or None. Runs user code."""
    if not of_process and not manners.initializer:
        return None
    try:
        given: Any = of_process.pop() if of_process else load(manners.initializer)
        initializer, initargs = given
        if initializer is not None:
            initializer(*initargs)
    except BaseException as error:
        logger.critical("Exception in initializer:", exc_info=True)
        return error
    return None


class ThreadInitializerFailed(PercoreError):
    """The thread_initializer of an executor has raised; its cause tells what."""


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


class MannerlyAnswers(Answers):
    """Answers as the standard library's workers do."""

    def __init__(self, channel: Channel, *, main_by_value: bool, is_pool: bool) -> None:
        super().__init__(channel, main_by_value=main_by_value)
        self._is_pool = is_pool

    def unpack(
        self, call_id: int, function: Function | None, body: Body, send: Send
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any] | None]:
        """As there; in a pool a failure ends this process."""
        try:
            return super().unpack(call_id, function, body, send)
        except BaseException:
            if self._is_pool:
                _die()
            raise

    def error(self, call_id: int, error: BaseException, send: Send) -> None:
        """Send what was raised, of whatever class."""
        sink = dump_exception(error, lambda: Sink(self._channel.outgoing), main_by_value=self._main_by_value, as_itself=True)
        self._channel.send_payload(ERROR, call_id, sink.payload(), send)

    def _refused(self, value: object, error: BaseException) -> BaseException:
        error.add_note(unpicklable(value, error).text)
        return error


def _die() -> NoReturn:
    """End now, as a process of multiprocessing that cannot read what it was sent."""
    try:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        os._exit(1)
