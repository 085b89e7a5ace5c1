"""Buffers for the results of a map until the user asks for them: in order, as they come, or as a list."""

from collections import deque
from typing import Any, ClassVar, NamedTuple, NoReturn


class Failure:
    """An error in place of a result. The map ends there."""

    __slots__ = ("_error",)

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def unwrap(self) -> NoReturn:
        """Raise the error. Call it once: this object then forgets the error, whose traceback refers to the frames that hold it."""
        error = self._error
        del self._error
        try:
            raise error
        finally:
            del error


class Part(NamedTuple):
    """Consecutive results, ready to be handed over.

    Attributes:
        values: the results.
        size: approximate size of each pickled result in bytes.
    """

    values: list[Any]
    size: float


class Results:
    """Results as they come. Each is ready at once."""

    is_list: ClassVar[bool] = False
    """Whether the results are handed over all together, when the map is over."""

    def __init__(self) -> None:
        self.ready: deque[Part] = deque()
        """The results that can be handed over now."""

    def put(self, number: int, values: list[Any], size: int) -> None:
        """Add the results of consecutive items. `number` is that of the first item, `size` the bytes of all results together."""
        self.ready.append(Part(values, size / len(values)))

    def drop(self) -> None:
        """Forget the results, because nobody will get them."""
        self.ready.clear()


class Ordered(Results):
    """Results in the order of the inputs. A result is ready when all results before it have come."""

    def __init__(self) -> None:
        super().__init__()
        self._early: dict[int, Part] = {}
        self._next = 0

    def put(self, number: int, values: list[Any], size: int) -> None:
        part: Part | None = Part(values, size / len(values))
        if number != self._next:
            self._early[number] = part  # type: ignore[assignment]
            return
        while part is not None:
            self.ready.append(part)
            self._next += len(part.values)
            part = self._early.pop(self._next, None) if self._early else None

    def drop(self) -> None:
        super().drop()
        self._early.clear()


class Listed(Results):
    """All results as a list, in order or as they came. `ready` stays empty."""

    is_list: ClassVar[bool] = True

    def __init__(self, *, ordered: bool) -> None:
        super().__init__()
        self.values: list[Any] = []
        self._ordered = ordered

    def put(self, number: int, values: list[Any], size: int) -> None:
        if not self._ordered or number == len(self.values):
            self.values += values
            return
        missing = number + len(values) - len(self.values)
        if missing > 0:
            self.values += [None] * missing
        self.values[number : number + len(values)] = values
