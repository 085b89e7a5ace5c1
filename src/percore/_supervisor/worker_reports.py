"""Handlers for the messages of workers about themselves: they are ready, drain, or their lifespan has failed."""

from collections.abc import Callable
from typing import Any, Protocol

from percore._protocol.messages import DRAINING, FAILED, HOLDING, READY, UNREADY, Payload
from percore._serialization.exception_state import CAUSE, format_traceback, text_of, type_name_of
from percore._serialization.exceptions import load_exception
from percore._supervisor.pool_worker import PoolWorker


class StateReports(Protocol):
    """The pool, which learns how the state of a worker changes."""

    def ready(self, member: PoolWorker) -> None:
        """A worker has entered its lifespan. If it does not wait to take over, it gets calls from now on."""

    def unready(self, member: PoolWorker, error: BaseException, text: str) -> None:
        """A worker's start failed with this error, and the worker is about to end. `text`: the error as the log shows it."""

    def failing(self, member: PoolWorker) -> None:
        """The lifespan of a worker failed while it served. The worker gets no more calls and is about to end."""

    def failed(self, member: PoolWorker, error: BaseException, text: str) -> None:
        """Note and log the error by which a worker's lifespan failed. `text`: the error as the log shows it."""

    def draining(self, member: PoolWorker) -> None:
        """Something outside percore asked a worker to end. The worker gets no more calls, and its replacement starts now."""


class WorkerReports:
    """Tells the pool what workers report of themselves."""

    def __init__(self, pool: StateReports) -> None:
        self._pool = pool

    def handlers(self, member: PoolWorker) -> dict[int, Callable[[int, Any], None]]:
        """Return the handlers of the messages of one worker, by op."""
        return {
            READY: lambda _, pid: self._ready(member, pid),
            UNREADY: lambda _, body: self._unready(member, body),
            DRAINING: lambda _, __: self._pool.draining(member),
            FAILED: lambda _, body: self._failed(member, body),
            HOLDING: lambda _, is_holding: member.holds(bool(is_holding)),
        }

    def _ready(self, member: PoolWorker, pid: int) -> None:
        member.worker.ready(pid)
        self._pool.ready(member)

    def _unready(self, member: PoolWorker, payload: Payload) -> None:
        error = member.worker.channel.load(payload).load(load_exception)
        self._pool.unready(member, error, _text(error))

    def _failed(self, member: PoolWorker, payload: Payload | None) -> None:
        """The worker's lifespan failed. The first message has no payload, the second one carries the exception."""
        self._pool.failing(member)
        if payload is not None:
            error = member.worker.channel.load(payload).load(load_exception)
            self._pool.failed(member, error, _text(error))


def _text(error: BaseException) -> str:
    """Return the worker's traceback. Runs no code of the error's class, if there is one.

    It ends the chain of causes, unless the error itself has arrived, with the frames of its worker.
    """
    if error.__traceback__ is not None:
        return format_traceback(error)
    last = error
    while (cause := CAUSE.__get__(last)) is not None:  # no cycle: `load_exception` has broken it
        last = cause
    return f"{type_name_of(error)}: {text_of(error)}" if last is error else str(last)
