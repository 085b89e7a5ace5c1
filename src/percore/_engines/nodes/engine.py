"""The engine of workers on several nodes: each node has a host, which runs workers with a process engine of its own.

    supervisor ── NodesEngine ── a NodeLink for each node ── one connection ── Host ── processes
                      └── Places: puts hosts on nodes

Slots are dealt to the nodes in turn, and keep their node while that is there. When a node is lost, its slots move to the others at
once. When none is left, the engine asks `Places` for nodes again.
"""

import asyncio
import logging
import os
import socket
import ssl
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, Final, cast

from percore._calls.worker_start import pickled_option, start_of
from percore._common.errors import shown
from percore._common.log import Faults, report
from percore._common.options import RunnerOptions
from percore._common.sure_handles import SureHandle, surely_later
from percore._engines.nodes.link import BEATS, NodeLink, Refused
from percore._engines.nodes.places import NoPlace, Place, Places
from percore._engines.nodes.store import NodesStore
from percore._engines.nodes.worker import NodeWorker
from percore._engines.processes.launch import search_path
from percore._monitor.usage import ProcessUsage, Usage, UsageMeter
from percore._protocol.host_orders import Greeting, HostOrders, greeting
from percore._protocol.interfaces import Exit, Worker
from percore._serialization.pickler import MainInfo
from percore._transport.connection import Pulse
from percore._transport.proven import dial
from percore._transport.wire import Kind
from percore._transport.wire_proof import TOKEN_SIZE, NotProven

LOST_AFTER: Final = 10.0
NO_SOCKETS: Final = (
    "listen=... needs workers on this machine: other nodes cannot have its sockets. Let each worker open a server of "
    "its own in its lifespan, and put a load balancer before them"
)
NO_HARDENING: Final = (
    "harden=True closes processes of this machine, and not those that run hosts on other nodes: leave it out, and let "
    "each node run programs of one user alone"
)
_END: Final = 5.0
"""Seconds that a host has for its end, once its workers have ended."""
_PAUSE: Final = 1.0
"""Seconds between two searches for nodes while there is none."""
_EARLIER: Final = 0.9
"""The part of `start_timeout` after which a start of hosts fails, so that its own reason is told."""


class NoNode(OSError):
    """There is no node for a worker. The text says why."""

    def __repr__(self) -> str:
        return str(self)


class NodesEngine:
    """Implements `Engine`."""

    sees_starts = False
    on_place: Callable[[], None]

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        options: RunnerOptions,
        main: MainInfo,
        places: Places,
        *,
        lost_after: float = LOST_AFTER,
    ) -> None:
        """Connect nothing yet: the first `start` does.

        Raises:
            ValueError: the options cannot be kept on other nodes.
            Exception: an error from pickling the options.
        """
        if options.listen:
            raise ValueError(NO_SOCKETS)
        if options.harden:
            raise ValueError(NO_HARDENING)
        self.store = NodesStore(loop, options, main)
        self._loop = loop
        self._places = places
        self._token = os.urandom(TOKEN_SIZE)
        self._patience = _EARLIER * options.start_timeout
        try:
            self._orders = self._orders_for(options, main, lost_after)
        except BaseException:
            self.store.close()
            raise
        self.links: list[NodeLink] = []
        self._ends: dict[NodeLink, Callable[[], None]] = {}
        self._slots: dict[int, NodeLink] = {}
        self._pulse = Pulse(lost_after / BEATS)
        self._search: asyncio.Task[None] | None = None
        self._again: SureHandle | None = None
        """The timer of the next search, while there is no node."""
        self.no_place = ""
        """Why the last search has found no node for each host that it wanted."""
        self._first_failure = ""
        """Why the first search failed: then the runner cannot start."""
        self._is_closed = False
        self._meter = UsageMeter()

    def _orders_for(self, options: RunnerOptions, main: MainInfo, lost_after: float) -> HostOrders:
        sizes = ("concurrency", "threads", "max_message", "start_method", "workers")
        loop_factory = pickled_option("loop_factory", options.loop_factory, self.store)
        return HostOrders(
            node="",
            lost_after=lost_after,
            sizes=_UNUSED | {name: getattr(options, name) for name in sizes},
            start=start_of(options, self.store),
            loop_factory=loop_factory,
            debug=self._loop.get_debug(),
            main=main.as_tuple(),
            source=_source(main),
            path=search_path(),
            argv=[str(argument) for argument in sys.argv],
        )

    # Workers

    def start(
        self, index: int, generation: int, on_exit: Callable[[Exit], None], sockets: Sequence[socket.socket]
    ) -> NodeWorker | None:
        link = self._link_for(index)
        if link is not None:
            return link.start(index, generation, on_exit)
        if self._first_failure:
            raise NoNode(self._first_failure)
        self._find_nodes()
        return None

    def _link_for(self, index: int) -> NodeLink | None:
        """Return the node of a slot: that of before, or the one with the fewest slots for its weight.

        A new slot waits for the nodes that are sought, if any are.
        """
        link = self._slots.get(index)
        if link not in self.links and self.links and (self._search is None or link is not None):
            held = Counter(self._slots.values())
            link = min(self.links, key=lambda one: ((held[one] + 1) / one.weight, one.node))
            self._slots[index] = link
        return link if link in self.links else None

    def _homeless(self) -> int:
        """Return how many workers have no node."""
        return int(self._orders.sizes["workers"]) - sum(link in self.links for link in self._slots.values())

    def _find_nodes(self) -> None:
        if self._search is None and self._again is None and not self._is_closed:
            self._search = self._loop.create_task(self._find())
            self._search.add_done_callback(self._has_ended)

    def _has_ended(self, search: "asyncio.Task[None]") -> None:
        """Search again if this search was cut short: the program has cancelled all tasks, a Ctrl-C came, or there was an error."""
        error = None if search.cancelled() else search.exception()
        if self._search is search:
            self._search = None
            if (search.cancelled() or error is not None) and not self._is_closed:
                self._again = surely_later(self._loop, _PAUSE, self._find_again)
        if isinstance(error, Exception):  # the loop has raised any other
            Faults("nodes were searched for").note(error)

    async def _find(self) -> None:
        """Put hosts on the nodes that have none, and connect to them. Search again while there is no node, except at first."""
        failed, is_first = await self._search_once(), not self._slots
        why, before = "; ".join(failed), self.no_place
        self._search, self.no_place = None, why
        if not is_first and not self.links:
            if why != before:
                report(logging.WARNING, "no node can be used: %s", why)
            self._again = surely_later(self._loop, _PAUSE, self._find_again)
            return
        for one in failed if not is_first else ():
            report(logging.WARNING, "%s", one)
        if failed and is_first:
            self._first_failure = why
            for link in self.links[:]:  # the start fails, and nothing else tells it why
                link.connection.give_up("another node could not be used")
        self.on_place()

    def _find_again(self) -> None:
        self._again = None
        self._find_nodes()

    async def _search_once(self) -> list[str]:
        """Return why hosts could not be put on nodes or used."""
        end = self._loop.time() + self._patience
        try:
            async with asyncio.timeout_at(end):
                placed = await self._places.place(self._token, {link.node for link in self.links}, self._homeless())
                failed = [str(one) for one in placed if isinstance(one, NoPlace)]
                found = [one for one in placed if isinstance(one, Place)]
                left = end - self._loop.time()
                return failed + [why for why in await self._connect_all(found, left * _EARLIER) if why]
        except NoPlace as error:
            return [str(error)]
        except TimeoutError:
            return [f"no node could be used within {self._patience:g} s"]
        except Exception as error:
            return [shown(error)]

    async def _connect_all(self, placed: list[Place], patience: float) -> list[str]:
        try:
            return await asyncio.gather(*(self._connect(place, patience) for place in placed))
        except BaseException:
            linked = {link.node for link in self.links}
            for place in placed:
                if place.node not in linked:
                    place.end()
            raise

    async def _connect(self, place: Place, patience: float) -> str:
        """Make the link to a host within so many seconds. Return why not, or an empty text."""
        where = f"node {place.node} ({place.address}:{place.port})"
        link = None
        try:
            async with asyncio.timeout(patience):
                sock = await dial(self._loop, (place.address, place.port), self._token, place.certificates)
                try:
                    link = NodeLink(self._loop, sock, place, self.store, self._lost)
                except BaseException:
                    sock.close()
                    raise
                self._check_versions(await link.greet())
                room = await link.set_up(self._orders._replace(node=place.node))
                self._check_room(room)
        except BaseException as error:
            if link is not None:
                link.close()
            place.end()
            if not isinstance(error, Exception):
                raise
            return _reason(where, error)
        assert not link.is_lost, "nobody would tell the loss of this node"
        self._ends[link] = place.end
        self.links.append(link)
        self._pulse.add(link.connection)
        return ""

    def _check_versions(self, there: Greeting) -> None:
        here = greeting(os.getpid())
        if (here.python, here.percore) != (there.python, there.percore):
            raise Refused(
                f"it has {there.python} and percore {there.percore}, and this program {here.python} and percore {here.percore}: "
                "install the same on all nodes, for example with runtime_env"
            )

    def _check_room(self, room: int) -> None:
        if not self._slots and room < self.store.room:  # nothing was sent yet
            self.store.fit(room)
        if room < self.store.room:
            raise Refused(
                f"it has room for {room} payloads of max_message={self.store.limit} bytes, and {self.store.room} are needed: "
                "raise its limit (ulimit -v), or make the runner with a smaller max_message"
            )

    # Loss

    def _lost(self, link: NodeLink, why: str) -> None:
        if link not in self.links:
            return
        self.links.remove(link)
        self._pulse.discard(link.connection)
        Faults("a node was lost").run(
            partial(link.end_workers, why),
            partial(self.store.forget, link),
            self._ends.pop(link),
            partial(self._tell_lost, link, why),
        )

    def _tell_lost(self, link: NodeLink, why: str) -> None:
        if not self._is_closed:
            report(logging.WARNING, "node %s (%s) was lost: %s", link.node, link.address, why)

    def rouse(self) -> None:
        """Do nothing: its workers are no threads of this process."""

    def renew(self) -> None:
        for link in self.links:
            link.send(Kind.RENEW, 0)

    def resize(self, workers: int) -> None:
        for link in self.links:
            link.send(Kind.RESIZE, workers)
        self._orders = self._orders._replace(sizes=self._orders.sizes | {"workers": workers})
        self._find_nodes()

    # Readings

    async def usage(self, workers: Sequence[tuple[str, Worker]]) -> Usage:
        own = await self._meter.read({os.getpid(): "supervisor"})
        return Usage((*own.processes, *await self.usage_elsewhere(workers)))

    async def usage_elsewhere(self, workers: Sequence[tuple[str, Worker]]) -> Sequence[ProcessUsage]:
        """Return the usage of these workers, and of the hosts."""
        known = [(role, worker) for role, worker in workers if isinstance(worker, NodeWorker)]
        links = self.links[:]
        asked = [[(role, worker.number) for role, worker in known if worker.link is link] for link in links]
        answers = await asyncio.gather(*(link.ask(Kind.USAGE, roles) for link, roles in zip(links, asked, strict=True)))
        return [
            replace(one, role=f"host {link.node}") if one.role == "supervisor" else one
            for link, answer in zip(links, answers, strict=True)
            for one in (ProcessUsage(*row) for row in answer)
        ]

    async def memory(self, workers: Sequence[Worker], enough: int) -> list[int | None]:
        sizes: dict[int, int | None] = {}
        known = sorted(cast("Sequence[NodeWorker]", workers), key=lambda worker: id(worker.link))
        for link, of_link in groupby(known, key=lambda worker: worker.link):
            those = list(of_link)
            if not link.is_lost:
                answer: Collection[Any] = await link.ask(Kind.MEMORY, [worker.number for worker in those], enough)
                sizes |= {id(worker): size for worker, size in zip(those, answer, strict=False)}
        return [sizes.get(id(worker)) for worker in workers]

    async def aclose(self) -> None:
        self._is_closed = True
        if self._again is not None:
            self._again.cancel()
        try:
            if self._search is not None:
                self._search.cancel()
                with suppress(asyncio.CancelledError):
                    await self._search
            links, self.links = self.links, []
            await asyncio.gather(*(self._end(link) for link in links))
        finally:  # `asyncio.run` may cancel this task, too
            self._pulse.end()
            try:
                await self._places.aclose()
            finally:
                self.store.close()

    async def _end(self, link: NodeLink) -> None:
        try:
            if not await link.aclose(_END):
                report(logging.WARNING, "the host on node %s did not end within %g s, and was killed", link.node, _END)
        finally:
            self._ends.pop(link)()


_UNUSED: Final = dict.fromkeys(
    (
        "lifespan",
        "loop_factory",
        "max_tasks_per_worker",
        "max_memory_per_worker",
        "per_key",
        "thread_initializer",
        "max_pending",
        "blocked_after",
    )
) | {"start_timeout": 60.0, "kill_after": 5.0, "retries": 0, "contextvars": (), "listen": ()}
"""The options of a runner that its hosts need not know."""


def _reason(where: str, error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"{where} did not answer in time: see whether a firewall drops connections to its ports from this machine"
    if isinstance(error, ssl.SSLError):
        return (
            f"{where} and this program do not trust each other: {shown(error)}: both need a certificate of the same authority, and "
            "that of the host must be valid for the address"
        )
    if isinstance(error, OSError):
        return f"{where} cannot be reached: {shown(error)}: let connections from this machine to all its ports through"
    if isinstance(error, NotProven):
        return f"{where} is not the host that was started there: {error}"
    return f"{where} cannot be used: {error if isinstance(error, Refused) else shown(error)}"


def _source(main: MainInfo) -> bytes | None:
    """Return the source of the program's script. None: it is none, or cannot be read."""
    if main.kind != "script":
        return None
    try:
        with open(main.target, "rb") as file:
            return file.read()
    except OSError:
        return None
