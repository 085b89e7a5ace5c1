"""The calls that run in `StepWorker`: what each may do. A call makes nested calls and waits for them. A stream yields items."""

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from percore._engines.threads.references import Reference
from percore._protocol.messages import (
    ANSWER_ERROR,
    ANSWER_ITEM,
    ANSWER_ITEMS,
    ANSWER_RESULT,
    ANSWER_VALUE,
    ASK,
    CANCELLED,
    CLOSE,
    DROP,
    ENDED,
    ERROR,
    GRANT,
    ITEMS,
    VALUE,
    Kind,
)
from percore._protocol.nested_calls import NestedRequest, RequestOptions
from percore._serialization.exceptions import load_exception

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.stepped_workers import Step, StepWorker

Label: TypeAlias = int | str
"""The number of a call of the user; for a nested call the label of its caller, a point, and a number."""

ANSWERS: Final = frozenset({ANSWER_VALUE, ANSWER_RESULT, ANSWER_ERROR, ANSWER_ITEMS, ANSWER_ITEM})


class Ask(NamedTuple):
    """A nested call that calls may make."""

    kind: int | None = None
    """None: that of its caller."""
    key: str | None = None
    """None: that of its caller."""
    prefetch: int = 0
    """Of a stream; 0: it is a call."""
    retries: int = 0
    queue_timeout: float | None = None
    hard_timeout: float | None = None


class Child:
    """A nested call, as its caller sees it."""

    def __init__(self, label: str, prefetch: int) -> None:
        self.label = label
        self.prefetch = prefetch
        self.arrived = self.taken = self.since = 0
        """Items of a stream: those that have arrived, those that were taken, and those since the last GRANT."""
        self.is_closing = False


class Run:
    """A call that has begun and was not answered."""

    def __init__(self, worker: "StepWorker", number: int, label: Label, kind: int, prefetch: int) -> None:
        self.worker = worker
        self.number = number
        self.label = label
        self.kind = kind
        self.prefetch = self.credits = prefetch
        """Of a stream; 0: it is a call."""
        self.produced = 0
        self.is_cancelled = False
        """Whether it was cancelled; of a stream: whether its generator is to be closed."""
        self.children: dict[int, Child] = {}
        """The nested calls without an answer."""
        self.is_aside = False
        """Whether its thread lets another one run."""

    @property
    def is_stream(self) -> bool:
        return self.prefetch > 0

    # What may happen

    def steps(self) -> "Iterator[Step]":
        """What it does by itself."""
        if self.is_aside:
            return
        name = f"{self.worker.name} "
        if self.is_stream:
            if self.credits and self.produced < self.worker.world.case.items:
                yield f"{name}yields {self.label}", self.produce
            if self.is_cancelled or (self.credits and self.produced == self.worker.world.case.items):
                yield f"{name}ends {self.label}", self.end
            return
        for number, child in self.children.items():
            if child.taken < child.arrived and not child.is_closing:
                yield f"{name}takes {child.label}", partial(self.take, number)
        if not self.children:
            yield f"{name}answers {self.label}", self.answer
            if self.is_cancelled:
                yield f"{name}answers {self.label} all the same", partial(self.answer, suppresses=True)

    def choices(self) -> "Iterator[Step]":
        """What its function may do, as events of the case."""
        if self.is_aside:
            return
        name = f"{self.worker.name} {self.label}"
        case = self.worker.world.case
        is_free = not (self.is_cancelled or self.is_stream or (self.children and self.kind == Kind.THREAD))
        if is_free and str(self.label).count(".") < case.depth:
            for index in range(len(case.asks)):
                yield f"asks {name} {index}", partial(self.ask, case.asks[index])
        for number, child in self.children.items():
            yield f"drops {name} {child.label}", partial(self.drop, number)
            if child.prefetch and not child.is_closing:
                yield f"shuts {name} {child.label}", partial(self.shut, number)
        if self.children:
            yield f"abandons {name}", self.answer
        yield f"raises {name}", self.fail

    # A stream

    def produce(self) -> None:
        self.worker.tell(ITEMS, self.number, (0, -1.0, [self.produced], []))
        self.produced += 1
        self.credits -= 1
        self.look()

    def credit(self, count: int) -> None:
        self.credits += count
        self.look()

    def end(self) -> None:
        self.worker.ended(self, CANCELLED if self.is_cancelled else ENDED, None)

    # A call

    def answer(self, *, suppresses: bool = False) -> None:
        is_cancelled = self.is_cancelled and not suppresses
        value = None if is_cancelled else self.label
        self.worker.ended(self, CANCELLED if is_cancelled else VALUE, value)

    def fail(self) -> None:
        self.worker.ended(self, ERROR, self.worker.world.store.exception(LookupError(str(self.label)), as_itself=True))

    def cancel(self) -> None:
        """The caller, or the consumer, needs it no more. A plain call without nested calls does not notice."""
        if self.kind == Kind.TASK or self.is_stream or self.children:
            self.is_cancelled = True
        self.drop_all()
        self.look()

    def ask(self, ask: Ask) -> None:
        worker = self.worker
        worker.asked += 1
        label = worker.world.asks(self.label, ask)
        given = RequestOptions(ask.retries or None, None, None, ask.queue_timeout, ask.hard_timeout)
        options = given if any(given) else None
        pickle = Reference((None, (), {"value": label}))
        request = NestedRequest(
            *(self.number, self.kind if ask.kind is None else ask.kind, "nested", "tests", ask.key, ask.key is None, ask.prefetch),
            *(None if options is None else tuple(options), None, (), pickle),
        )
        self.children[worker.asked] = Child(label, ask.prefetch)
        worker.nested[worker.asked] = label
        worker.tell(ASK, worker.asked, tuple(request))
        self.look()

    def hear(self, op: int, number: int, body: Any) -> None:
        """Take an answer."""
        child, world = self.children[number], self.worker.world
        if op == ANSWER_ITEMS:
            values, pickled = body
            assert not pickled
            assert values == [*range(child.arrived, child.arrived + len(values))], f"{child.label}: items {values}"
            child.arrived += len(values)
        else:
            del self.children[number]
            error = world.store.received(body).load(load_exception) if op == ANSWER_ERROR else None
            world.was_told(child, body if error is None else error)
        self.look()

    def take(self, number: int) -> None:
        """Take an item of a nested stream."""
        child = self.children[number]
        child.taken += 1
        child.since += 1
        if child.since >= max(1, child.prefetch // 2):
            self.worker.tell(GRANT, number, child.since)
            child.since = 0
        self.look()

    def shut(self, number: int) -> None:
        """Close a nested stream, and wait for its end."""
        self.children[number].is_closing = True
        self.worker.tell(CLOSE, number, None)
        self.look()

    def drop(self, number: int) -> None:
        del self.children[number]
        self.worker.tell(DROP, number, None)
        self.look()

    def drop_all(self) -> None:
        for number in list(self.children):
            del self.children[number]
            self.worker.tell(DROP, number, None)

    # Its place

    def can_go_on(self) -> bool:
        """Whether it waits for nothing."""
        if self.is_stream:
            return self.credits > 0 or self.is_cancelled
        return not self.children or any(child.taken < child.arrived and not child.is_closing for child in self.children.values())

    def look(self) -> None:
        """Let the thread of a plain call step aside, or come back."""
        worker = self.worker
        if self.kind != Kind.THREAD or self.number not in worker.running:
            return
        if not self.can_go_on():
            self.is_aside = True
            if self.number in worker.back:
                worker.back.remove(self.number)
        elif self.is_aside and self.number not in worker.back:
            worker.back.append(self.number)
        worker.admit()
