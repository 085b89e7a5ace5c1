"""Handlers for the messages about the items of a stream, and about its end without an error."""

from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from percore._calls.nested import NestedStream
from percore._calls.streams import StreamCall
from percore._protocol.messages import ENDED, ITEM, ITEMS, BrokenFrame, Payload
from percore._supervisor.call_registry import CallRegistry
from percore._supervisor.outcomes import load_all, unloadable
from percore._supervisor.pool_worker import PoolWorker


class StreamItems:
    """Handles the messages about streams of all workers of a runner. The outcome of one that fails arrives as that of a call."""

    def __init__(self, calls: CallRegistry) -> None:
        self._calls = calls

    def handlers(self, member: PoolWorker) -> dict[int, Callable[[int, Any], None]]:
        """Return the handlers of the messages of one worker, by op."""
        return {
            ITEMS: lambda call_id, body: self._items(_stream_of(member, call_id), body),
            ITEM: lambda call_id, body: self._item(member, _stream_of(member, call_id), body),
            ENDED: lambda call_id, _: self._ended(member, _stream_of(member, call_id)),
        }

    def _items(self, stream: StreamCall | NestedStream, body: bytes) -> None:
        """Take the next items of a stream, up to the first that cannot be unpickled."""
        _, _, values, pickled = self._calls.store.unpack_values(body)
        if isinstance(stream, NestedStream):
            stream.arrived(values, pickled)
            return
        failures = self._load(stream, values, pickled) if pickled and not stream.done() else {}
        first = min(failures, default=None)
        stream.arrived(values if first is None else values[:first])
        if first is not None and not stream.done():  # unpickling runs user code, which may have left the stream
            stream.abandon(failures[first])

    @staticmethod
    def _load(stream: StreamCall, values: list[Any], pickled: list[int]) -> dict[int, Exception]:
        size, began = sum(len(values[place]) for place in pickled), monotonic_ns()
        failures = load_all(values, pickled, "item")
        if stream.function.meter.name:
            stream.function.meter.loaded_all(len(pickled), monotonic_ns() - began, size)
        return failures

    def _item(self, member: PoolWorker, stream: StreamCall | NestedStream, payload: Payload) -> None:
        channel = member.worker.channel
        if isinstance(stream, NestedStream):
            data = channel.read(payload)
            try:
                stream.item(data)
            finally:
                del data
                channel.release(payload)
            return
        if stream.done():  # do not run user code (unpickling) for an item that nobody takes
            channel.release(payload)
            return
        received, began = channel.load(payload), monotonic_ns()
        try:
            item = received.load()
        except BaseException as error:
            if not received.is_leased:
                channel.release(payload)
            if not stream.done():
                stream.abandon(unloadable(error, "item"))
            if issubclass(type(error), KeyboardInterrupt):  # as for the result of a call
                raise error
            return
        if stream.function.meter.name:
            stream.function.meter.loaded_all(1, monotonic_ns() - began, received.size)
        stream.arrived([item])
        if not received.is_leased:
            channel.release(payload)

    def _ended(self, member: PoolWorker, stream: StreamCall | NestedStream) -> None:
        stream.ended()
        self._calls.ended(member, stream)


def _stream_of(member: PoolWorker, call_id: int) -> StreamCall | NestedStream:
    """Return the stream that a message is about.

    Raises:
        KeyError, BrokenFrame: the worker has no such stream.
    """
    call = member.calls[call_id]
    if type(call) is not StreamCall and type(call) is not NestedStream:
        raise BrokenFrame(f"items of call {call_id}, which is no stream")
    return call
