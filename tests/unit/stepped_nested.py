"""The nested calls and streams that the calls of one worker of `stepped_workers` make: it asks for them, and takes the answers."""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from percore._protocol.messages import ANSWER_ERROR, ANSWER_ITEMS, ANSWER_VALUE, ASK, CLOSE, DROP, GRANT
from percore._protocol.nested_calls import NestedRequest
from tests import jobs

if TYPE_CHECKING:
    from tests.unit.stepped_workers import StepWorker

KEYS: Final = (None, "k", "other")
"""The keys of nested calls. Without one a call belongs to the key of its caller."""


class StepNested:
    """The nested calls of one worker."""

    def __init__(self, worker: "StepWorker") -> None:
        self._worker = worker
        self.asked: dict[int, int] = {}
        """Those that have no answer, each with the call that has made it."""
        self._arrived: dict[int, int] = {}
        """How many items of streams have arrived, and were not taken."""
        self._closing: set[int] = set()
        """Streams whose end was asked for."""
        self._dropped: set[int] = set()
        """Those that had no answer when their callers were cancelled."""
        self.handlers: dict[int, Callable[[int, Any], None]] = {
            ANSWER_ITEMS: self._take_items,
            ANSWER_VALUE: self._take_answer,
            ANSWER_ERROR: self._take_answer,
        }

    def events(self, name: str, callers: Collection[int]) -> Iterator[tuple[str, Callable[[], object]]]:
        """What its calls may do. `callers`: those that run."""
        for caller in callers:
            label = self._worker.labels[caller]
            for key in KEYS:
                yield f"asks {name} {label} {key}", partial(self._ask, caller, key, 0)
                yield f"pulls {name} {label} {key}", partial(self._ask, caller, key, 1)
        for number in sorted(self._arrived.keys() & self.asked.keys() - self._closing):
            yield f"leaves {name} {number}", partial(self._leave, number)

    def steps(self, name: str) -> Iterator[tuple[str, Callable[[], object]]]:
        """What happens by itself."""
        for number, items in self._arrived.items():
            if items and number in self.asked and number not in self._closing:
                yield f"{name} takes {number}", partial(self._take_item, number)

    def drop(self, caller: int) -> None:
        """Withdraw those of a call that was cancelled."""
        for number in [number for number, one in self.asked.items() if one == caller]:
            del self.asked[number]
            self._dropped.add(number)
            self._worker.tell(DROP, number, None)

    def _ask(self, caller: int, key: str | None, prefetch: int) -> None:
        world = self._worker.world
        number = world.nested()
        self.asked[number] = caller
        if prefetch:
            self._arrived[number] = 0
        pickle = world.store.pickled((jobs.echo, (), {"value": number}))
        request = NestedRequest(caller, world.kind, "echo", "tests.jobs", key, key is None, prefetch, None, None, (), pickle)
        self._worker.tell(ASK, number, tuple(request))

    def _leave(self, number: int) -> None:
        """Close a stream, and wait for its end."""
        self._closing.add(number)
        self._worker.tell(CLOSE, number, None)

    def _take_item(self, number: int) -> None:
        self._arrived[number] -= 1
        self._worker.tell(GRANT, number, 1)

    def _take_items(self, number: int, body: Any) -> None:
        if number in self.asked:
            self._arrived[number] += len(body[0])

    def _take_answer(self, number: int, body: Any) -> None:
        if number in self._dropped:  # it was on its way
            self._dropped.discard(number)
            return
        world = self._worker.world
        if self.asked.pop(number, None) is None:
            world.broken.append(AssertionError(f"nested call {number} was answered twice, or after its caller has ended"))
        elif type(body) is int:
            world.judge_nested(number, body)
