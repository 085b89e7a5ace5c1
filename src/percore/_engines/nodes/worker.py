"""A worker on a node, as the supervisor sees it."""

import asyncio
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from percore._common.sure_handles import surely_soon
from percore._engines.nodes.channel import NodeChannel
from percore._protocol.interfaces import UNBEGUN, Condition, Exit, Fate
from percore._protocol.messages import Body, pid_told
from percore._transport.wire import Kind, pack

if TYPE_CHECKING:
    from percore._engines.nodes.node import Node


class NodeWorker:
    """Implements `Worker`.

    Attributes:
        number: its number on its link.
        index: its slot.
        node: the name of its node.
        fates: how far its calls had come, complete when `ended` is set.
        ended: set when the worker has ended. Until then nobody here can tell how far a call is.
        is_lost: whether its node was lost: then nobody ever can.
    """

    thread_ids = ()

    def __init__(  # the parts that it connects
        self,
        loop: asyncio.AbstractEventLoop,
        number: int,
        index: int,
        link: "Node",
        channel: NodeChannel,
        on_exit: Callable[[Exit], None],
    ) -> None:
        self.number = number
        self.index = index
        self.channel = channel
        self.node = link.node
        self.link = link
        self.pid: int | None = None
        self.fates: dict[int, Fate] = {}
        self.examined: list[Callable[[Condition], None]] = []
        self.ended = asyncio.Event()
        self.is_lost = False
        self._loop = loop
        self._on_exit = on_exit

    def ready(self, told: Body) -> None:
        self.pid = pid_told(told)

    def kill(self, signum: int = signal.SIGKILL) -> None:
        self.link.send(Kind.KILL, self.number, pack((int(signum),)))

    def examine(self, told: Callable[[Condition], None]) -> None:
        if self.link.is_full:  # the question would wait, too
            surely_soon(self._loop, told, Condition("the connection to its node is slow"))
            return
        self.examined.append(told)
        self.link.send(Kind.EXAMINE, self.number)

    def told(self, condition: Condition) -> None:
        """The answer to the first `examine` that has none."""
        if self.examined:
            self.examined.pop(0)(condition)

    def fate(self, call_id: int) -> Fate:
        if self.is_lost:
            return UNBEGUN if call_id in self.channel.unsent else Fate(begun=None)
        return self.fates.get(call_id, UNBEGUN) if self.ended.is_set() else Fate(begun=None)

    def exited(self, end: Exit) -> None:
        """Report the end, as the host has told it, or since its node was lost."""
        self.is_lost = end.place_lost
        self.channel.flush()  # what was sent since the connection broke was not sent
        self.ended.set()
        self._on_exit(end)

    def close(self) -> None:
        self.channel.close()
