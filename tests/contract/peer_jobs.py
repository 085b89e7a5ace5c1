"""What test_peers_recycling has workers do."""

import resource
import weakref
from typing import Any


class Result:
    """Known wherever it is unpickled, for as long as it is alive."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.number,)


ALIVE: "weakref.WeakSet[Result]" = weakref.WeakSet()
arrived = 0


def _arrived(number: int) -> Result:
    global arrived
    arrived += 1
    result = Result(number)
    ALIVE.add(result)
    return result


def give(number: int) -> Result:
    return Result(number + 0)


async def agive(number: int) -> Result:
    return give(number)


def take(size: int) -> int:
    """Take so much memory for good; how much this worker has had at most."""
    _taken.append(b"x" * size)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


_taken: list[bytes] = []
