"""Finds out which single call a sample belongs to.

A stack does not name its call. The program's pages do, twice a second: they have the calls that run, each with an id. A call that
two pages have in turn has run all the time between them. So it was the call of each stack of its function that was seen meanwhile,
if it was the only one; else only the threads tell the stacks apart.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from percore._record.samples import AWAITING, Frame, Stack

SHORT: Final = "shorter calls"
"""Stands for calls that were not seen twice."""


class Seen(NamedTuple):
    """A stack that was seen once or more.

    Attributes:
        worker: the worker, as the recording shows it.
        thread: what tells its threads apart.
        stack: the user's frames.
        times: how often it was seen.
    """

    worker: str
    thread: str
    stack: Stack
    times: int = 1


class Call(NamedTuple):
    """A call that runs.

    Attributes:
        name: the qualified name of its function.
        began: when it began, by the monotonic clock; None: nobody can tell.
        number: tells it from the other calls of the recording.
    """

    name: str
    began: float | None
    number: int

    @property
    def short_name(self) -> str:
        return self.name.rpartition(".")[2]

    def label(self, start: float) -> str:
        """Return what the flame graph calls it. `start`: the start of the recording."""
        if self.began is None:
            return f"call {self.number}"
        seconds = self.began - start
        return f"call {self.number}, begun " + (f"{-seconds:.2f} s before" if seconds < 0 else f"after {seconds:.2f} s")


Calls: TypeAlias = Mapping[tuple[str, int, int], Call]
"""The calls that run, by worker, its generation, and id."""


def calls_in(workers: Iterable[tuple[str, float, dict[str, Any]]], known: Calls, numbers: Iterator[int]) -> Calls:
    """Return the calls that run.

    `workers`: the label of each, the time of its page, and its statistics. `known`: the calls of the page before, which stay as
    they are. `numbers` gives the others their numbers.
    """
    found = {}
    for label, at, worker in workers:
        for call in worker["current"]:
            key = label, worker["generation"], call.get("id")  # pages of earlier versions have none
            if key[-1] is not None:
                began = None if call["seconds"] is None else at - call["seconds"]
                found[key] = known.get(key) or Call(call["name"], began, next(numbers))
    return found


def begun_by(calls: Calls, moment: float) -> Calls:
    """Return those of the calls that had begun by this moment."""
    return {key: call for key, call in calls.items() if call.began is not None and call.began <= moment}


def attributed(
    seen: Sequence[Seen], before: Calls, after: Calls, start: float, rounds: int = 1
) -> Iterator[tuple[str, str, Stack, int]]:
    """Yield the worker, the label of the call, the stack and how often, for stacks and for calls that awaited.

    `seen`: what was seen in so many rounds between two pages. `before` and `after`: the calls of these pages.
    """
    calls: dict[tuple[str, str], list[Call]] = {}
    for key in before.keys() & after.keys():
        calls.setdefault((key[0], before[key].short_name), []).append(before[key])
    threads = Counter({(one.worker, one.thread, _function(one)) for one in seen})
    stacks = Counter((worker, name) for worker, _, name in threads)
    for one in seen:
        where = one.worker, _function(one)
        running = calls.get(where, [])
        if len(running) == stacks[where] == 1:
            label = running[0].label(start)
        else:
            label = f"{one.thread}: one of several calls" if running else SHORT
        yield one.worker, label, one.stack, one.times
    awaiting = {(key[0], call.short_name): call.name for page in (before, after) for key, call in page.items()}
    for where in awaiting.keys() - stacks.keys():
        for label in [call.label(start) for call in calls.get(where, ())] or [SHORT]:
            yield where[0], label, (Frame(awaiting[where], ""), AWAITING), rounds


def _function(one: Seen) -> str:
    return one.stack[0].name.rpartition(".")[2]
