"""The order of the events of one call over all processes: submitted, begun, ended, told. One machine has one monotonic clock.

    submitted ≤ begun ≤ ended ≤ begun again ≤ ended ≤ told

An attempt without an end died with its worker. Then the next attempt, and the error, came after everything that this worker did.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, Protocol


class Event(Protocol):
    """An entry of the ledger."""

    @property
    def pid(self) -> int: ...
    @property
    def ns(self) -> int: ...


class Attempt(NamedTuple):
    """One time that a call ran. `end`: None, it has not ended."""

    pid: int
    begin: int
    end: int | None


class Life(NamedTuple):
    """What is known of one call.

    Attributes:
        submitted: when; None: it was not.
        attempts: in the order of their beginnings.
        told: when its caller heard of its end.
        kind: the kind of the call.
        words: the outcome.
        is_cut: whether the runner was closing.
    """

    submitted: int | None
    attempts: Sequence[Attempt]
    told: int
    kind: str
    words: Sequence[str]
    is_cut: bool


_UNTOLD: Final = frozenset({"dropped", "unpulled", "full"})
"""Outcomes that nobody was told at a moment of their own."""
_ENDED: Final = frozenset({"value", "error", "bytes", "pair", "remote"})
_PARALLEL: Final = frozenset({"everywhere"})
"""It runs in all workers at once."""
_RUNS_ON: Final = frozenset({"stream"})
"""Its consumer is told items before its end, and may leave it."""


def attempts_of(begins: Sequence[Event], ends: Sequence[Event]) -> list[Attempt]:
    """Return the attempts of a call: each end belongs to the latest beginning before it in the same worker."""
    attempts: list[Attempt] = []
    for begin in sorted(begins, key=lambda event: event.ns):
        later = [event.ns for event in begins if event.pid == begin.pid and event.ns > begin.ns]
        until = min(later, default=None)
        own = [end.ns for end in ends if end.pid == begin.pid and end.ns >= begin.ns and (until is None or end.ns <= until)]
        attempts.append(Attempt(begin.pid, begin.ns, max(own, default=None)))
    return attempts


def disorders(life: Life, last_sign: Callable[[Attempt], int]) -> Iterator[str]:
    """Yield what is wrong with the order of a call's events.

    `last_sign`: when the worker of an attempt has done its last visible thing.
    """
    name, attempts = life.words[0], life.attempts
    if name in ("unpulled", "full"):
        return
    if life.submitted is None:
        yield "was never submitted"
        return
    if life.submitted > life.told:
        yield "was told before it was submitted"
    if any(attempt.begin < life.submitted for attempt in attempts):
        yield "began before it was submitted"
    if life.kind in _PARALLEL:
        return
    for attempt, following in pairwise(attempts):
        if attempt.end is None and following.begin < last_sign(attempt):
            yield f"began again while the worker {attempt.pid} of its last attempt still lived"
        elif attempt.end is not None and following.begin < attempt.end:
            yield "began again before its last attempt had ended"
    if attempts and name not in _UNTOLD and life.kind not in _RUNS_ON:
        yield from _end(life, attempts[-1], last_sign)


def _end(life: Life, last: Attempt, last_sign: Callable[[Attempt], int]) -> Iterator[str]:
    name = life.words[0]
    has_result = name in _ENDED or (name == "timeout" and life.kind == "slow" and not life.is_cut)
    if has_result and last.end is None:
        yield "has an outcome of its own, and never ended"
    elif has_result and last.end is not None and last.end > life.told:
        yield "was told before it had ended"
    if name == "died" and life.words[1] == "1" and int(life.words[2]) == last.pid and last_sign(last) > life.told:
        yield f"was told of the death of worker {last.pid}, which lived on"
