"""The inbox of a channel between threads loses no message, whoever sends and whenever the other side stops reading."""

import asyncio
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue

import pytest

from percore._engines.threads.channel import ThreadChannel
from percore._engines.threads.references import References
from percore._protocol.messages import VALUE, Message
from tests.counts import times
from tests.waiting import until

SENDERS = 4
PATIENCE = 20
"""Seconds after which a message counts as lost."""


@contextmanager
def switching(seconds: float) -> Iterator[None]:
    """Threads take turns this often, where they take turns at all."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)


class Reader:
    """Takes messages as a supervisor does, and knows the next number of each sender."""

    def __init__(self, acks: list[SimpleQueue[None]] | None) -> None:
        self.acks = acks
        self.next = [0] * SENDERS
        self.error: BaseException | None = None

    def take(self, messages: Iterable[Message]) -> None:
        for _, sender, number in messages:
            assert number == self.next[sender], f"message {number} of sender {sender} in the place of {self.next[sender]}"
            self.next[sender] += 1
            if self.acks is not None:
                self.acks[sender].put(None)

    def broken(self, error: BaseException) -> None:
        self.error = error


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("waits", [False, True], ids=["at full speed", "each waits until its message is read"])
async def test_no_message_of_four_threads_is_lost_or_overtaken(waits: bool) -> None:
    """A message that was lost stays lost only if no later one rings. So in one of the rounds each sender has one under way."""
    loop = asyncio.get_running_loop()
    channel = ThreadChannel(loop, References(loop))
    side = channel.peer
    side.loop = loop
    each = times(2_500, 50_000) if waits else times(25_000, 2_500_000)
    acks: list[SimpleQueue[None]] | None = [SimpleQueue() for _ in range(SENDERS)] if waits else None
    reader = Reader(acks)
    channel.open(reader.take, reader.broken)
    side.open(lambda _: None, reader.broken)

    def send(sender: int) -> None:
        with suppress(Empty):
            for number in range(each):
                side.send_from_thread(VALUE, sender, number)
                if acks is not None:
                    acks[sender].get(timeout=PATIENCE)
        loop.call_soon_threadsafe(ended.release)

    ended = asyncio.Semaphore(0)
    threads = [threading.Thread(target=send, args=(sender,)) for sender in range(SENDERS)]
    with switching(1e-6):
        for thread in threads:
            thread.start()
        for _ in threads:
            await ended.acquire()
    for thread in threads:
        thread.join()
    await until(lambda: not channel.rung)  # then nobody will take what is left
    assert reader.error is None
    assert reader.next == [each] * SENDERS
    assert not channel.inbox
    side.stop()
    channel.close()
