"""The functions that `percore bench` calls. Workers of every pool import this module, so it imports nothing."""


def nothing(number: int) -> int:
    """Return the argument: what this takes is the pool's own time."""
    return number


def work(steps: int) -> int:
    """Compute for about a millisecond per 10,000 steps."""
    total = 0
    for step in range(steps):
        total += step * step
    return total


def same(data: bytes) -> bytes:
    """Return the argument."""
    return data


async def wait(number: int) -> int:
    """Do in a worker what a coroutine does between two waits."""
    return work(2_000) + number
