"""The results of a map that nobody has asked for yet: as a stream in order, as a stream as they come, or as a list."""

from collections import deque
from typing import Any, NamedTuple, Protocol


class Failure:
    """An error in the place of a result, which ends the map there."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class Part(NamedTuple):
    """Results to be handed over, one after the other.

    Attributes:
        values: the results.
        size: bytes of each, about, as it was pickled.
    """

    values: list[Any]
    size: float


class Results(Protocol):
    """Where the results of a map wait."""

    ready: deque[Part]

    def put(self, number: int, values: list[Any], size: int) -> None:
        """Results of the items from this number on, `size` bytes together."""


class Ordered:
    """Ready is what nothing before it is missing of."""

    def __init__(self) -> None:
        self.ready: deque[Part] = deque()
        self._early: dict[int, Part] = {}
        self._next = 0

    def put(self, number: int, values: list[Any], size: int) -> None:
        """Implement `Results`."""
        part: Part | None = Part(values, size / len(values))
        if number != self._next:
            self._early[number] = part  # type: ignore[assignment]
            return
        while part is not None:
            self.ready.append(part)
            self._next += len(part.values)
            part = self._early.pop(self._next, None) if self._early else None


class AsTheyCome:
    """Everything is ready."""

    def __init__(self) -> None:
        self.ready: deque[Part] = deque()

    def put(self, number: int, values: list[Any], size: int) -> None:
        """Implement `Results`."""
        self.ready.append(Part(values, size / len(values)))


class Listed:
    """All results as a list, in order or as they came. Nothing is handed over before the end."""

    def __init__(self, *, ordered: bool) -> None:
        self.ready: deque[Part] = deque()
        self.values: list[Any] = []
        self._ordered = ordered

    def put(self, number: int, values: list[Any], size: int) -> None:
        """Implement `Results`."""
        if not self._ordered or number == len(self.values):
            self.values += values
            return
        missing = number + len(values) - len(self.values)
        if missing > 0:
            self.values += [None] * missing
        self.values[number : number + len(values)] = values
