"""The listening sockets of a runner: they belong to the slots of its pool, not to their workers.

    open ─▶ each worker of a slot gets the slot's sockets ─▶ ... ─▶ close, before the workers are asked to end

After the close only the workers have the sockets. An address is free when the last server there has stopped.
"""

from contextlib import ExitStack
from typing import TYPE_CHECKING

from percore._scheduler.listening import plan

if TYPE_CHECKING:
    import socket
    from collections.abc import Collection, Sequence

    from percore._common.addresses import Address
    from percore._listening.endpoints import Endpoint
    from percore._supervisor.pool_worker import PoolWorker
    from percore._supervisor.worker_slot import WorkerSlot


class Listening:
    """The sockets of one runner."""

    def __init__(
        self, listen: "Sequence[Address | socket.socket]", slots: "Sequence[WorkerSlot]", members: "Collection[PoolWorker]"
    ) -> None:
        """`slots`: those in use. `members`: all workers that have not ended."""
        self.addresses: tuple[str, ...] = ()
        """The addresses, as in `listen`, with the ports that the system has chosen. Empty until they are open."""
        self._endpoints = _endpoints(listen)
        self._slots = slots
        self._members = members
        self.is_used = bool(self._endpoints)
        """Whether the runner has addresses."""
        self._is_open = False

    def open(self) -> None:
        """Listen on all addresses.

        Raises:
            OSError: the system refuses one of them; nothing is left behind.
        """
        with ExitStack() as undo:
            for endpoint in self._endpoints:
                endpoint.open(len(self._slots))
                undo.callback(endpoint.close)
            undo.pop_all()
        self.addresses = tuple(endpoint.address for endpoint in self._endpoints)
        self._is_open = True

    def sockets(self, slot: int) -> "tuple[socket.socket, ...]":
        """Return the sockets of a slot, in the order of `listen`.

        Raises:
            OSError: the slot has none yet, and the system refuses one.
        """
        assert self._is_open or not self.is_used, "a worker starts after the end"
        return tuple(endpoint.of(slot) for endpoint in self._endpoints)

    def look(self) -> None:
        """Adapt to a change of the slots or their workers."""
        if not self._is_open or not self.is_used:
            return
        kept, steered = plan(self._slots, {member.index for member in self._members})
        for endpoint in self._endpoints:
            endpoint.steer(steered)  # first: a socket that is closed gets no connection meanwhile
            endpoint.keep(kept)
            endpoint.steer(steered)  # the system has numbered the others anew

    def close(self) -> None:
        """Close the sockets and remove the files. Idempotent."""
        self._is_open = False
        for endpoint in self._endpoints:
            endpoint.close()


def _endpoints(listen: "Sequence[Address | socket.socket]") -> "tuple[Endpoint, ...]":
    if not listen:
        return ()
    from percore._listening.endpoints import endpoint_of  # few runners listen

    return tuple(map(endpoint_of, listen))
