"""The store of an engine of nodes: which node has a parcel, and when a slot here is free again."""

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from percore import Runner
from percore._engines.nodes import channel as channels
from percore._engines.nodes.channel import NodeChannel
from percore._engines.nodes.link import NodeLink
from percore._engines.nodes.store import NodesStore
from percore._serialization.pickler import MainInfo
from tests.waiting import until

LARGE = bytes(200_000)


class Link:
    """A link that writes when the test says so."""

    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []
        self.reading: list[Callable[[], None]] = []

    def keep(self, parcel: int, data: memoryview, let_go: Callable[[], None]) -> None:
        assert len(data) > len(LARGE)
        self.said.append(("keep", parcel))
        self.reading.append(let_go)

    def drop(self, parcel: int) -> None:
        self.said.append(("drop", parcel))


@pytest.fixture
async def store() -> Any:
    store = NodesStore(asyncio.get_running_loop(), Runner(max_message=1 << 36)._options, MainInfo("module", "tests"))
    yield store
    store.close()


async def test_a_slot_is_free_when_nobody_sends_it_any_more(store: NodesStore) -> None:
    links: Any = [Link(), Link()]
    parcel = store.pickler().payload(LARGE)
    assert type(parcel) is int
    for link in (links[0], links[1], links[0]):
        store.carry(parcel, link)
    assert [link.said for link in links] == [[("keep", parcel)]] * 2
    assert store.carried_to(links[0]) == {parcel}
    links[0].reading.pop()()
    store.discard(parcel)
    assert [link.said[1:] for link in links] == [[("drop", parcel)]] * 2
    assert (store.in_use, store.carried_to(links[1])) == (1, set())
    other = store.pickler().payload(LARGE)
    assert other != parcel
    links[1].reading.pop()()
    assert store.in_use == 1
    assert store.pickler().payload(LARGE) == parcel  # each node has dropped it: the number may come again


async def test_a_lost_node_has_nothing(store: NodesStore) -> None:
    links: Any = [Link(), Link()]
    parcel: Any = store.pickler().payload(LARGE)
    for link in links:
        store.carry(parcel, link)
    store.forget(links[0])
    store.discard(parcel)
    assert [len(link.said) for link in links] == [1, 2]


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


async def test_an_interrupt_while_messages_are_gathered_costs_one_worker_alone(
    store: NodesStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the other channel has to send would wait for ever: it counts as told."""
    sent: list[int] = []
    broken: list[BaseException] = []
    later: list[Callable[[], None]] = []
    link: Any = SimpleNamespace(_dirty=[], _loop=SimpleNamespace(call_soon=later.append), connection=Mock(), is_full=False)
    link._flush = partial(NodeLink._flush, link)
    link.wants = lambda one: NodeLink.wants(link, one)
    link.put = lambda _kind, number, _data, *, unsent: sent.append(number)
    for number in (1, 2):
        channel = NodeChannel(number, link, store)
        channel.open(lambda _: None, broken.append, lambda: None)
        channel.send(1, 5, (7,))
    with monkeypatch.context() as patch:
        patch.setattr(channels, "next_frame", interrupted)
        with pytest.raises(KeyboardInterrupt):
            later.pop()()
    assert [type(error) for error in broken] == [KeyboardInterrupt]
    later.pop()()
    assert len(sent) == 1
    assert link.connection.write.called


async def test_what_the_loop_has_lost_is_made_up_for(store: NodesStore) -> None:
    """As by a Ctrl-C just before a callback: the flush of the messages, the count of beats, and those who wait for a slot."""
    loop, counted, called = asyncio.get_running_loop(), Mock(), Mock()
    link: Any = SimpleNamespace(_dirty=[], _loop=Mock(time=loop.time), connection=Mock(), is_full=False)
    link.is_lost, link._lost_after = False, 1.0
    link._flush = partial(NodeLink._flush, link)
    link.wants = lambda one: NodeLink.wants(link, one)
    link.catch_up = partial(NodeLink.catch_up, link)
    link._watch, link._look, link.put = loop.call_later(3600, lambda: None), counted, Mock()
    channel = NodeChannel(1, link, store)
    channel.open(lambda _: None, Mock(), lambda: None)
    channel.catch_up()
    assert not link.connection.write.called
    assert not counted.called
    slots: Any = [store.take() for _ in range(store.count)]
    store.wait(called)
    store._is_waking = True
    store.give(slots.pop(), 0)
    channel.send(1, 5, (7,))
    link._watch.cancel()
    link._watch = Mock(when=lambda: loop.time() - 2)
    channel.catch_up()
    assert link.connection.write.called
    assert counted.called
    assert called.called
    for slot in slots:
        store.give(slot, 0)


async def test_a_waiter_that_is_interrupted_keeps_no_other_one_waiting(store: NodesStore) -> None:
    called = asyncio.Event()
    slots: Any = [store.take() for _ in range(store.count)]
    store.wait(interrupted)
    store.wait(called.set)
    with pytest.raises(KeyboardInterrupt):
        _give_and_wake(store, slots.pop())
    await called.wait()
    for slot in slots:
        store.give(slot, 0)


def _give_and_wake(store: NodesStore, slot: int) -> None:
    store._is_waking = True  # the loop would report the interrupt, and end
    store.give(slot, 0)
    store.has_room()


async def test_waiters_are_called_in_order_in_the_loop_whoever_gives_a_slot_back(store: NodesStore) -> None:
    slots: Any = [store.take() for _ in range(store.count)]
    called: list[tuple[int, bool]] = []
    here = threading.get_ident()
    for number in range(3):
        store.wait(lambda number=number: called.append((number, store.take() is not None and threading.get_ident() == here)))  # type: ignore[misc]
    thread = threading.Thread(target=lambda: [*map(store.give, slots[:2], [0, 0])])
    thread.start()
    await until(lambda: len(called) == 2)
    thread.join()
    assert called == [(0, True), (1, True)]
    store.give(slots[2], 0)
    await until(lambda: len(called) == 3)
    store.wait(lambda: called.append((3, store.take() is None)))
    await asyncio.sleep(0)
    assert called[2:] == [(2, True)]
