"""Shared objects in a worker: met in arguments, built when a call asks for one, given up when the supervisor says so."""

import threading
from typing import Any, NoReturn

from percore import _shared
from percore._ipc.channel import Channel
from percore._ipc.copies import Copy
from percore._messages import FORGOTTEN, KNOWN
from percore._shared import Shared
from percore._worker.context import current


class Known:
    """A shared object that this worker has met."""

    def __init__(self, channel: Channel, number: int, payload: int) -> None:
        self._number = number
        self._payload = payload
        self._channel = channel
        self.copy = Copy(channel.leases, payload, self._forgotten)

    def _forgotten(self) -> None:
        if self._channel.is_open:
            self._channel.send(FORGOTTEN, self._number, None)

    # As a Source

    def value(self) -> Any:
        return self.copy.value()

    def close(self) -> NoReturn:
        raise RuntimeError("a shared object can be closed only in the program that shared it, not in a worker")

    def travel(self) -> tuple[int, int]:
        return self._number, self._payload

    def left(self) -> None:
        """The supervisor knows better when it is of no use any more."""

    def __str__(self) -> str:
        return f"number {self._number}, in a worker"


class Shares:
    """All that one worker has met."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.RLock()  # for arithmetic alone; re-entrant, since a collection may begin in there
        self._known: dict[int, Known] = {}

    def arrive(self, number: int, payload: int) -> Shared[Any]:
        """The handle of this number, in any thread, while a call that holds it is unpickled."""
        with self._lock:
            known = self._known.get(number)
            is_new = known is None
            if known is None:
                known = self._known[number] = Known(self._channel, number, payload)
        if is_new:
            self._channel.send_from_thread(KNOWN, number, None)
        return Shared(known)

    def forget(self, number: int, _body: None) -> None:
        """No call that may use it is left. In the loop."""
        self._known.pop(number).copy.forget()

    def stop(self) -> None:
        """The worker ends: let go of all of them."""
        for number in list(self._known):
            self.forget(number, None)


def _find(number: int, payload: int) -> Shared[Any] | None:
    context = current()
    return None if context is None or context.shares is None else context.shares.arrive(number, payload)


_shared.sides.insert(0, _find)
