"""The store of an engine of nodes: an arena here, from which each node gets a copy with the first call there that needs it.

    object ──pickled into──▶ a slot here ──sent as it is──▶ a slot of the node ──seen by──▶ its workers

Invariants:

- A parcel has the same number here and on every node that has it, from KEEP to DROP. Both travel in order. So a number that is free
  here, because its parcel was discarded, may be used again at once.
- A slot here is free when its parcel was discarded and no connection still reads it: a KEEP that is being sent holds it.
- A node never has more parcels than there are slots here, which is half of its own. The leases of its workers may take the rest.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from percore._common.options import RunnerOptions
from percore._common.sure_handles import surely_from_thread
from percore._protocol.messages import Payload
from percore._serialization.pickler import MainInfo
from percore._transport.arena import Arena
from percore._transport.links import map_arena
from percore._transport.memory import keep_heap_warm
from percore._transport.slots import SLOT_BITS, SLOT_MASK

if TYPE_CHECKING:
    from percore._engines.nodes.node import Node


class NodesStore(Arena):
    """Implements `Store`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, options: RunnerOptions, main: MainInfo) -> None:
        """Map the arena.

        Raises:
            OSError: there is not enough memory for even one message.
        """
        self._waiting: deque[Callable[[], object]] = deque()
        self._is_waking = False
        self._carried: dict[int, set[Node]] = {}
        """The nodes that have a parcel."""
        self._mapped, slot_size = map_arena(options.max_message, 2)
        super().__init__(self._mapped, slot_size, options.max_message, loop, main_by_value=main.by_value)
        self.fit(self.count)
        keep_heap_warm()
        _stores.add(self)

    def fit(self, room: int) -> None:
        """Use this many slots: a node has no room for more. To be called before any slot is taken."""
        assert not self.in_use, "a slot that is taken may be beyond the room"
        self.count = self.room = room
        self.most_shared, self.most_functions = max(1, room // 2), room // 8
        self.most_kept = max(1, room - 1 - self.most_functions)

    # Parcels on nodes

    def carry(self, parcel: int, link: "Node") -> None:
        """Send a placed parcel to a node, unless that has it."""
        nodes = self._carried.setdefault(parcel, set())
        if link not in nodes:
            nodes.add(link)
            self.hold(parcel)
            link.keep(parcel, self.read(parcel), partial(self.give, parcel & SLOT_MASK, parcel >> SLOT_BITS))

    def discard(self, payload: Payload) -> None:
        if type(payload) is int and self._is_ours:  # else this is a fork of the program
            for link in self._carried.pop(payload, ()):
                link.drop(payload)
        super().discard(payload)

    def forget(self, link: "Node") -> None:
        """A node is lost."""
        for nodes in list(self._carried.values()):  # a `__del__`, run by a garbage collection, may discard a payload
            nodes.discard(link)

    def carried_to(self, link: "Node") -> set[int]:
        """Return the parcels that a node has."""
        return {parcel for parcel, nodes in self._carried.items() if link in nodes}

    # Who waits for a slot, or for a connection: in one queue, and called in the loop alone

    def wait(self, waiter: Callable[[], object]) -> None:
        self._waiting.append(waiter)
        if self.has_free():  # it was given back meanwhile, by the thread that pickles a shared object
            self._wake()

    def wait_for_link(self, waiter: Callable[[], object]) -> None:
        """Have `waiter` called in the loop once a connection that is full has room, after those that came before it."""
        self._waiting.append(waiter)

    def has_room(self) -> None:
        """There may be room: call those that wait for it, each once at most."""
        self._is_waking = False
        for _ in range(len(self._waiting)):
            if not self.has_free():
                break
            try:
                self._waiting.popleft()()
            except BaseException:  # its channel has broken; the others wait for the same
                self._wake()
                raise

    def give(self, slot: int, used: int) -> None:
        super().give(slot, used)
        self._wake()

    def _wake(self) -> None:
        if self._waiting and not self._is_waking:
            self._is_waking = True
            with suppress(RuntimeError):  # the loop was closed
                surely_from_thread(self._loop, self.has_room)

    def close(self) -> None:
        """Release the memory."""
        self._mapped.close()


_stores: Final[WeakSet[NodesStore]] = WeakSet()


def _disown_all() -> None:
    for store in list(_stores):
        store.disown()


os.register_at_fork(after_in_child=_disown_all)
