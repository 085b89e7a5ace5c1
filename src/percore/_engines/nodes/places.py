"""What puts hosts on nodes: the only part of an engine of nodes that knows who has the nodes."""

from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

from percore._transport.certificates import Certificates


class Place(NamedTuple):
    """A host that waits for the program.

    Attributes:
        node: the name of its node, which no other node has.
        address, port: where it listens.
        end: ends the host at once, and all its workers with it. Idempotent.
        weight: how many workers are meant to run there, beside the weights of the other nodes.
        certificates: those of this program, if the host speaks TLS.
    """

    node: str
    address: str
    port: int
    end: Callable[[], None]
    weight: int = 1
    certificates: Certificates | None = None


class NoPlace(Exception):
    """No host could be put anywhere. The text says on which node, why, and what to do."""


def dealt(workers: int, most: list[int]) -> list[int]:
    """Deal workers to nodes in turn, at most as many as each takes. If there are more workers, each node gets its most."""
    shares = [0] * len(most)
    while sum(shares) < workers and shares != most:
        for node, share in enumerate(shares):
            shares[node] += share < most[node] and sum(shares) < workers
    return shares


class Places(Protocol):
    """Puts hosts on nodes."""

    async def place(self, token: bytes, used: Collection[str], workers: int) -> "list[Place | NoPlace]":
        """Put a host on each node that is there now and not in `used`. Wait for a node if `used` is empty and there is none.

        Return a place, or why there is none, for each of these nodes.

        `workers`: how many workers have no node yet; more nodes than that need no host. `token`: 32 bytes that the host proves, and
        that its program has to prove to it. They travel by a way that is trusted.

        Raises:
            NoPlace: there is no node.
        """

    async def aclose(self) -> None:
        """Release everything, and wait until all hosts have ended. Idempotent."""
