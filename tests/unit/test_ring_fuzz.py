"""Bytes of a live ring that change, and bells that lie about what was published: no damaged frame is ever delivered."""

import random
from typing import Final

import pytest

from percore._protocol.messages import BrokenFrame
from percore._transport.ring import RingReader, RingWriter
from tests.counts import times

FRAMES: Final = times(20_000, 10_000_000)
SIZE: Final = 256
REPLAYED: Final = 8
"""Each so many rings the reader is told of more than was published: old frames, or a part of one."""


@pytest.mark.long
def test_r9_changed_bytes_and_lies_of_a_bell_deliver_no_wrong_frame() -> None:
    chance, seen, broken = random.Random(9), 0, 0
    while seen < FRAMES:
        delivered, was_broken = _one_ring(chance)
        seen += delivered
        broken += was_broken
    assert broken > FRAMES // 100


def _one_ring(chance: random.Random) -> tuple[int, bool]:
    """Write frames until one is damaged. Return how many were looked at, and whether the damage was seen."""
    cell = bytearray(SIZE)
    writer, reader = RingWriter(memoryview(cell)), RingReader(memoryview(cell))
    writer.written = writer.acknowledged = reader.read = reader.end = chance.randrange(1 << 40)
    looked = 0
    for _ in range(20):
        frames = [chance.randbytes(chance.randrange(1, 40)) for _ in range(chance.randrange(1, 4))]
        first = writer.written
        published = sum(writer.write(frame) for frame in frames)
        writer.written = first + published
        damaged = {chance.randrange(published) for _ in range(chance.choice((0, 0, 1, 2, 8)))}
        for at in damaged:
            cell[(first + at) % SIZE] ^= chance.randrange(1, 256)
        lie = 0 if chance.randrange(REPLAYED) else chance.randrange(-published, SIZE - published)
        reader.end += published + lie
        delivered, is_broken = _read(reader, len(frames))
        looked += len(frames)
        # Beyond what was published there may be whole frames of earlier rounds: only the bell tells that they are old.
        assert delivered == frames[: len(delivered)]
        if is_broken or damaged or lie:
            assert is_broken or not damaged or lie < 0, "a damaged frame was delivered"
            return looked, is_broken
        writer.acknowledge(published)
    return looked, False


def _read(reader: RingReader, count: int) -> tuple[list[bytes], bool]:
    delivered: list[bytes] = []
    try:
        while reader.read < reader.end and len(delivered) < count:
            delivered.append(bytes(reader.next()))
    except BrokenFrame:
        return delivered, True
    return delivered, False
