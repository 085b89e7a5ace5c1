"""Meters: what the supervisor counts and measures of the calls of each function.

All `Function`s of one name share a meter, since a function that travels by value becomes a new `Function` with each call. A meter
has a tally for each slot of the pool, which outlives the slot's workers. The hot paths change fields directly: `Outcomes`
increments a tally's `ended`, and the registry of calls counts a meter's `left` down, to note of every n-th call when it was
accepted. The measurements of a worker arrive in MEASURED.
"""

from collections.abc import Callable
from time import monotonic_ns
from typing import Any, Final

from percore._common.callables import full_name
from percore._common.measuring import NEVER, Gauge, Histogram

_MOST: Final = 1024
"""Names with a meter of their own. A program that makes functions without end, each with a name of its own, stays bounded."""

OTHERS: Final = "(other functions)"
"""The name of the meter of all further functions."""

_OFTEN_NS: Final = 4_000_000
"""Nanoseconds between two calls whose waits are measured below which fewer are measured."""

_MOST_SKIPPED: Final = 256
"""While calls follow one another quickly, the wait of one in so many is measured, at most."""

ALL: Final = 16
"""Batches of a function, and messages with their results, all of which are measured."""

_WEIGHT_BITS: Final = 10

_WORTH_NS: Final = 50_000_000
"""Nanoseconds of pickling from which on it is worth advice."""


class Tally:
    """What the workers of one slot have done of the functions of one name.

    Attributes:
        ended: calls that had begun there and have ended, including failures. Each item of a map counts.
        failed: those that have ended with an exception or with the death of their worker.
        run: for how many nanoseconds they have run.
        parts, batches: of maps, how many messages with results have come, and how many batches have answered first. After `ALL` of
            them each fourth is measured, and stands for four.
    """

    __slots__ = ("batches", "ended", "failed", "parts", "run")

    def __init__(self) -> None:
        self.ended = 0
        self.failed = 0
        self.parts = self.batches = 0
        self.run = Histogram()


class Meter:
    """The counts and the measured figures of the functions of one name.

    Attributes:
        name: module and qualified name.
        tallies: by slot.
        left: how many calls are accepted up to the next one whose wait is measured.
        wait, run: nanoseconds.
        payload: bytes of pickles.
        dumps, loads: gauges of pickling arguments and of unpickling results.
        pickled: by what was done (`dumps` and `loads` here, loads and dumps in workers), how often, and the nanoseconds.
    """

    __slots__ = ("_marked_at", "_skips", "dumps", "left", "loads", "name", "payload", "pickled", "run", "tallies", "wait")

    def __init__(self, name: str, *, is_on: bool = True) -> None:
        """`is_on`: False for one that measures nothing."""
        self.name = name
        self.tallies: dict[int, Tally] = {}
        self.left = 1 if is_on else NEVER
        self.wait, self.run, self.payload = Histogram(), Histogram(), Histogram()
        self.pickled = [(0, 0)] * 4
        self.dumps = Gauge(self._dumped if is_on else None)
        self.loads = Gauge(self._loaded if is_on else None)
        self._skips = 1
        self._marked_at = 0

    def at(self, slot: int) -> Tally:
        """Return the tally of a slot."""
        return self.tallies.get(slot) or self.tallies.setdefault(slot, Tally())

    def lost(self, slot: int) -> None:
        """Count a call that had begun in a worker of this slot and ended with its death."""
        tally = self.at(slot)
        tally.ended += 1
        tally.failed += 1

    def mark(self, now: int | None = None) -> int:
        """Return the mark of a call that is accepted now, and whose wait is measured: `waited` takes it back.

        The mark contains the time and how many calls this one stands for. It is not 0. `now`: the monotonic clock, in nanoseconds.
        """
        now = monotonic_ns() if now is None else now
        mark = now << _WEIGHT_BITS | self._skips
        is_often = now - self._marked_at < _OFTEN_NS
        self._marked_at = now
        self._skips = min(2 * self._skips, _MOST_SKIPPED) if is_often else max(1, self._skips // 2)
        self.left = self._skips
        return mark

    def mark_run(self) -> int:
        """Return the mark of items of a map that are taken now, each of which stands for itself; 0 if nothing is measured."""
        return monotonic_ns() << _WEIGHT_BITS | 1 if self.name else 0

    def waited(self, mark: int, began: int, calls: int = 1) -> None:
        """Note the wait of so many calls that have this mark and began at this time."""
        self.wait.add(max(0, began - (mark >> _WEIGHT_BITS)), calls * (mark & (1 << _WEIGHT_BITS) - 1))

    def dumped(self, nanoseconds: int, size: int) -> None:
        """Note how long it took to pickle the arguments of a call that is measured, and the size of the pickle."""
        self.payload.add(size, self.dumps.skips)
        self.dumps.took(nanoseconds)

    def loaded(self, nanoseconds: int, size: int) -> None:
        """Note how long it took to unpickle the result of a call that is measured, and the size of the pickle."""
        self.payload.add(size, self.loads.skips)
        self.loads.took(nanoseconds)

    def sized(self, size: int) -> None:
        """Note the size of a pickle that passes through."""
        if self.name:
            self.payload.add(size)

    def loaded_all(self, count: int, nanoseconds: int, size: int) -> None:
        """Note how long it took to unpickle `count` results, and the sum of their sizes."""
        self.payload.add(size // count, count)
        self._note(1, count, nanoseconds)

    def measured(self, loads: int, load_ns: int, dumps: int, dump_ns: int) -> None:
        """Note how often a worker has unpickled arguments and pickled results, and for how many nanoseconds."""
        self._note(2, loads, load_ns)
        self._note(3, dumps, dump_ns)

    def _dumped(self, nanoseconds: int, weight: int) -> None:
        self._note(0, weight, nanoseconds * weight)

    def _loaded(self, nanoseconds: int, weight: int) -> None:
        self._note(1, weight, nanoseconds * weight)

    def _note(self, what: int, count: int, nanoseconds: int) -> None:
        calls, spent = self.pickled[what]
        self.pickled[what] = calls + count, spent + nanoseconds

    def advice(self) -> str | None:
        """Return what to do if pickling takes longer than the work; else None."""
        (_, dumped), (_, loaded), (_, worker_loaded), (_, worker_dumped) = self.pickled
        whole, work = dumped + loaded + worker_loaded + worker_dumped, max(0, self.run.total - worker_loaded)
        if whole < _WORTH_NS or whole <= work or not self.run.count:
            return None
        times = f"{whole / work:.1f} times as long as the work" if work else "all of the time"
        if dumped + worker_loaded >= loaded + worker_dumped:
            return (
                f"pickling takes {times}, most of it for arguments: share what calls have in common (`runner.share`), "
                "or send a path or a key instead of the data"
            )
        return (
            f"pickling takes {times}, most of it for results: return less, for example a summary, "
            "or write the data to a file and return its path"
        )


UNMETERED: Final = Meter("", is_on=False)
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
