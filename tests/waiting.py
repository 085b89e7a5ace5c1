"""How a test waits for a state that has no event."""

import asyncio
from collections.abc import Callable

TURNS = 100
PAUSE = 0.001


async def until(is_so: Callable[..., object], *arguments: object) -> None:
    """Wait until it is so, with these arguments: look in each turn of the loop for a moment, and then a thousand times a second.

    Whoever brings it about needs the CPU. It is for a state that lasts: one that lasts for a turn may be missed.
    """
    turns = 0
    while not is_so(*arguments):
        turns += 1
        await asyncio.sleep(0 if turns < TURNS else PAUSE)
