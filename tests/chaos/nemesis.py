"""Which fault comes when: decisions that depend on the seed alone."""

import random
from collections.abc import Iterator
from typing import Final, NamedTuple


class Fault(NamedTuple):
    """One decision.

    Attributes:
        after: seconds since the one before.
        kind: of KINDS.
        target: which of the processes there are, from 0 to 1.
        pause: seconds until what was stopped goes on, or is killed.
    """

    after: float
    kind: str
    target: float
    pause: float


KINDS: Final = {
    "kill": 36,
    "segv": 10,
    "abrt": 10,
    "exit": 10,  # os._exit(0), between two instructions of its main thread
    "libc exit": 5,
    "drain": 10,
    "stop": 9,  # and go on
    "stop and kill": 4,
    "all": 3,  # every worker, also those that are just being born
    "fork server": 3,
}

KINDS_OF_NODES: Final = {**KINDS, "host": 8, "stop host": 6, "link": 8}
"""With workers on several nodes, for which processes of this machine stand."""


def schedule(seed: str, mean: float, of: dict[str, int] = KINDS) -> Iterator[Fault]:
    """Faults for ever, the times between them as of a Poisson process. `of`: the kinds, and how often each comes."""
    decide = random.Random(f"{seed}/faults")
    kinds, weights = list(of), list(of.values())
    while True:
        yield Fault(decide.expovariate(1 / mean), decide.choices(kinds, weights)[0], decide.random(), decide.uniform(0.002, 0.25))
