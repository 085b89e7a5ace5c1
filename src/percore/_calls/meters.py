"""Meters: what the supervisor counts of the calls of each function.

All `Function`s of one name share a meter, since a function that travels by value becomes a new `Function` with each call. The hot
paths of `Outcomes` increment a meter's fields directly; everything else about it happens when somebody asks for statistics.
"""

from collections.abc import Callable
from typing import Any, Final

from percore._common.callables import full_name

_MOST: Final = 1024
"""Names with a meter of their own. A program that makes functions without end, each with a name of its own, stays bounded."""

OTHERS: Final = "(other functions)"
"""The name of the meter of all further functions."""


class Meter:
    """The counts of the functions of one name.

    Attributes:
        name: module and qualified name.
        ended: calls that had begun in a worker and have ended, including failures. Each item of a map counts.
        failed: those that have ended with an exception or with the death of their worker.
    """

    __slots__ = ("ended", "failed", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.ended = 0
        self.failed = 0

    def lost(self) -> None:
        """Count a call that had begun in a worker and ended with its death."""
        self.ended += 1
        self.failed += 1


UNMETERED: Final = Meter("")
"""Takes the counts that nobody asks for."""


class Meters:
    """The meters of one runner, by name."""

    def __init__(self, *, is_on: bool = True) -> None:
        """`is_on`: False with PERCORE_METRICS=0."""
        self.is_on = is_on
        self._meters: dict[str, Meter] = {}

    def of(self, fn: Callable[..., Any]) -> Meter:
        """Return the meter of a function."""
        return self.named(full_name(fn)) if self.is_on else UNMETERED

    def named(self, name: str) -> Meter:
        """Return the meter of the functions of this name."""
        if not self.is_on:
            return UNMETERED
        meter = self._meters.get(name)
        if meter is None:
            if len(self._meters) >= _MOST:
                name = OTHERS
            meter = self._meters.setdefault(name, Meter(name))
        return meter

    def all(self) -> list[Meter]:
        """Return all meters, in the order of their functions' first calls. Any thread may call this."""
        return list(self._meters.values())
