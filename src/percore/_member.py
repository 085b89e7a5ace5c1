"""One worker as the supervisor keeps it: its life, what it was sent, what it has done."""

from typing import TYPE_CHECKING

from percore._calls import Call, Function
from percore._core.lifecycle import Life, State
from percore._messages import DEFINE, ONCE_OPS, Kind

if TYPE_CHECKING:
    from percore._engine import Worker


class Member:
    """A worker of a slot, from its start to its end."""

    def __init__(self, index: int, generation: int, room: int, now: float) -> None:
        self.index = index
        self.generation = generation
        self.life = Life()
        self.worker: Worker
        self.calls: dict[int, Call] = {}
        self.defined: set[int] = set()
        self.load = [0, 0]
        self.recalling = False
        self.began = False
        self.done = 0
        self.failed = 0
        self.started_at = now
        self.killed_why = ""
        # An id is a place and how often it was used: unique for the worker's life, and the place of its start mark.
        self.stride = places_for(room)
        self._free = [place + self.stride for place in reversed(range(room))]

    @property
    def pid(self) -> int | None:
        return self.worker.pid

    def is_behind(self) -> bool:
        """Whether the worker has not read everything it was sent."""
        return self.worker.channel.tx.is_unread()

    def send(self, call: Call, now: float) -> None:
        """Send a call. The worker must have room."""
        call_id = self._free.pop()
        call.call_id = call_id
        call.member = self
        call.age_from = now
        self.calls[call_id] = call
        self.load[call.kind] += 1
        function = call.function
        channel = self.worker.channel
        number = function.number
        if number:
            if number not in self.defined:
                self.define(function)
        else:
            number = ONCE_OPS[call.kind]
        body = call.body
        if type(body) is bytes:
            channel.send_payload(number, call_id, body)
        else:
            channel.send(number, call_id, body)

    def define(self, function: Function) -> None:
        """Tell the worker what a number stands for."""
        self.defined.add(function.number)
        self.worker.channel.send(DEFINE, function.number, (int(function.kind), function.payload))

    def take(self, call_id: int) -> Call:
        """The call of that id, which the worker is done with; its place is free.

        Raises:
            KeyError: it has no such call.
        """
        call = self.calls.pop(call_id)
        self._free.append(call_id + self.stride)
        self.load[call.kind] -= 1
        call.member = None
        return call

    def has_begun(self, call: Call) -> bool:
        """Whether a call had begun here. Of a dead worker alone."""
        return self.worker.started(call.call_id % self.stride, call.call_id)

    def statistics(self, threads: int) -> tuple[int, int]:
        """Calls running and calls queued ahead, as far as the supervisor knows."""
        running = self.load[Kind.TASK] + min(threads, self.load[Kind.THREAD])
        return running, self.load[Kind.TASK] + self.load[Kind.THREAD] - running

    @property
    def is_ready(self) -> bool:
        return self.life.state is State.READY


def places_for(room: int) -> int:
    """Start marks a worker with room for so many calls needs: a power of two."""
    return 1 << max(0, room - 1).bit_length()
