"""What the parts of an engine of nodes know of the link to a node."""

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from percore._transport.wire import Kind


class Sender(Protocol):
    """A part that gathers messages."""

    def flush(self) -> None:
        """Send them."""


class Node(Protocol):
    """The link to a node. `NodeLink` says what its methods do.

    Attributes:
        node: the name of the node.
        is_lost: whether the connection broke.
        is_full: whether much waits to be written to it.
    """

    node: str
    is_lost: bool

    @property
    def is_full(self) -> bool: ...

    @property
    def send(self) -> "Callable[..., None]":
        """`Connection.send`."""

    @property
    def put(self) -> "Callable[..., None]":
        """`Connection.put`."""

    def wants(self, sender: Sender) -> None: ...
    def catch_up(self) -> None: ...

    def keep(self, parcel: int, data: "memoryview | bytes", let_go: "Callable[[], None]") -> None: ...
    def drop(self, parcel: int) -> None: ...
    async def ask(self, kind: "Kind", *values: Any) -> list[Any]: ...
