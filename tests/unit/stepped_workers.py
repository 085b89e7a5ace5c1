"""Workers that do one thing at a time, when they are told to: parts of `call_orders`.

A worker here is a small model of a real one. It does not run code: it reads one message, begins, answers, produces an item, makes a
nested call, gets ready, dies.
"""

import signal
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from percore._protocol.interfaces import Exit, Fate
from percore._protocol.messages import (
    BATCH,
    BEGIN_BY,
    CANCEL,
    CANCELLED,
    CREDIT,
    DRAIN,
    DRAINING,
    FINISH,
    ONCE_OPS,
    READY,
    RECALL,
    RETURNED,
    TERMS,
    UNREADY,
    WITHDRAW,
    Kind,
    is_call,
)
from tests.unit.stepped_calls import ANSWERS, Label, Run
from tests.unit.stepped_loop import StepChannel

if TYPE_CHECKING:
    from tests.unit.call_orders import World

Step = tuple[str, Callable[[], object]]
_SERVES: Final = ("serving", "draining", "finished")


class StepWorker:
    """A worker that does one thing at a time."""

    node = None
    thread_ids = ()

    def __init__(self, world: "World", index: int, generation: int, on_exit: Callable[[Exit], None]) -> None:
        self.world = world
        self.index, self.generation, self.pid = index, generation, 1000 * generation + index
        self._on_exit = on_exit
        self.channel = StepChannel(self)
        self.inbox: deque[tuple[int, int, Any]] = deque()
        self.outbox: list[tuple[int, int, Any]] = []
        self.has_news = False
        """Whether the supervisor has something to hear: messages, or that all was read."""
        self.labels: dict[int, Label] = {}
        self.terms: dict[int, Any] = {}
        self.begun: dict[int, float] = {}
        """When each call has begun."""
        self.running: dict[int, Run] = {}
        self.waiting: deque[int] = deque()
        """Plain calls that wait for a thread."""
        self.back: deque[int] = deque()
        """Plain calls that were aside, and wait for a thread to go on."""
        self.kinds: dict[int, int] = {}
        self.begin_by: float | None = None
        """When the calls that follow must have begun."""
        self.deadlines: dict[int, float | None] = {}
        self.nested: dict[int, str] = {}
        """The labels of the nested calls that its calls have made, by their numbers."""
        self.asked = 0
        """How many nested calls its calls have made."""
        self.state = "starting"
        self.code = 0
        self.waits_since = 0.0
        self._handlers: dict[int, Callable[[int, Any], None]] = {
            TERMS: self.terms.__setitem__,
            BEGIN_BY: lambda _, when: self._limit(when),
            CREDIT: self._credit,
            CANCEL: lambda number, _: self._cancel(number),
            RECALL: self._recall,
            WITHDRAW: lambda number, _: self._return([number] if number in self.waiting else []),
            DRAIN: lambda *_: self._drain(),
            FINISH: lambda *_: self._finish(),
        }
        self.is_stuck = False
        """Whether it does nothing any more until it is killed, as a stopped or blocked one."""

    @property
    def name(self) -> str:
        return f"w{self.index}.{self.generation}"

    # Implements `Worker`

    def ready(self, _told: Any) -> None: ...

    def examine(self, _told: Any) -> None: ...

    def close(self) -> None:
        self.channel.is_open = False

    def kill(self, signum: int = signal.SIGKILL) -> None:
        if signum == signal.SIGTERM:
            self.inbox.append((DRAIN, 0, None))
        elif self.state != "gone":
            self.state, self.code = "dying", -signum

    def fate(self, number: int) -> Fate:
        began = self.begun.get(number)
        return Fate(began is not None, None if began is None else self.world.loop.now - began)

    # Steps

    def strikes(self) -> Iterator[Step]:
        """What may happen to this worker, and what its calls may choose to do."""
        if not self.is_stuck:
            yield f"sticks {self.name}", self.stick
        yield f"dies {self.name}", self.kill
        if self.state == "starting":
            yield f"fails {self.name}", self.fail
        elif self.state == "serving":
            yield f"drains {self.name}", partial(self.kill, signal.SIGTERM)
        if self.state in _SERVES and not self.is_stuck:
            for run in list(self.running.values()):
                yield from run.choices()

    def stick(self) -> None:
        self.is_stuck = True

    def is_overdue(self) -> bool:
        """Whether the supervisor has to end it, since it does not end by itself."""
        member = self.member
        if member is None or not self.is_stuck:
            return False
        has_hard_limit = any(self.world.has_hard_limit(run.label) for run in self.running.values())
        return has_hard_limit or member.life.deadline(has_calls=bool(member.calls)) is not None

    @property
    def member(self) -> Any:
        return next((one for one in self.world.supervisor.members if one.worker is self), None)

    def steps(self) -> Iterator[Step]:
        """What can happen in this worker now."""
        if self.state == "gone":
            return
        if self.channel.is_open and (self.outbox or self.has_news):
            yield f"s hears {self.name}", self.channel.receive
        if self.state == "dying":
            yield f"{self.name} is gone", self.exit
        elif self.is_stuck:
            return
        elif self.state == "starting":
            yield f"{self.name} ready", self.get_ready
        else:
            yield from self._own_steps()

    def _own_steps(self) -> Iterator[Step]:
        # First: a fair end may not ask a worker to drain again and again just before it begins its only call.
        if self.waiting and self.has_thread() and not self.back:
            yield f"{self.name} begins", lambda: self.begin(self.waiting.popleft())
        if self.inbox:
            yield f"{self.name} reads", self.read
        for run in list(self.running.values()):
            yield from run.steps()
        if self.state == "finished" or (self.state == "draining" and not (self.running or self.waiting)):
            yield f"{self.name} is gone", self.exit

    def get_ready(self) -> None:
        self.state = "serving"
        self.tell(READY, 0, self.pid)

    def fail(self) -> None:
        """The lifespan fails."""
        self.tell(UNREADY, 0, self.world.store.exception(ValueError("no"), as_itself=False))
        self.state, self.code = "dying", 1

    def tell(self, op: int, number: int, body: Any) -> None:
        self.outbox.append((op, number, body))
        self.has_news = True

    def read(self) -> None:
        op, number, body = self.inbox.popleft()
        if is_call(op):
            self._take(op, number)
        elif op in ANSWERS:
            self._hear(op, number, body)
        elif op in self._handlers:
            self._handlers[op](number, body)
        if not self.inbox:
            self.waits_since, self.has_news = 0.0, True

    def _take(self, op: int, number: int) -> None:
        assert op != BATCH
        self.kinds[number] = ONCE_OPS.index(op) if op in ONCE_OPS else self.world.kind
        self.deadlines[number] = self.begin_by
        if self.state != "serving":
            self.tell(RETURNED, number, None)
        elif self.kinds[number] == Kind.TASK:
            self.begin(number)
        else:
            self.waiting.append(number)

    def _hear(self, op: int, number: int, body: Any) -> None:
        for run in self.running.values():
            if number in run.children:
                run.hear(op, number, body)
                return

    def _limit(self, when: float | None) -> None:
        self.begin_by = when

    def _credit(self, number: int, count: int) -> None:
        if number in self.running:
            self.running[number].credit(count)

    def _recall(self, number: int, stay: bytes) -> None:
        self._return(list(self.waiting)[-number:] if number else [], stay)
        self.tell(RETURNED, 0, None)

    def _finish(self) -> None:
        self.state = "finished"

    def _return(self, calls: list[int], stay: bytes = b"") -> None:
        stride = 1 if (member := self.member) is None else member.stride
        kept = set(array("I", stay))
        for number in reversed(calls):
            if number % stride not in kept:
                self.waiting.remove(number)
                self.tell(RETURNED, number, None)

    def _drain(self) -> None:
        if self.state != "serving":
            return
        self.state = "draining"
        self.tell(DRAINING, 0, None)
        while self.waiting:
            self.tell(RETURNED, self.waiting.popleft(), None)

    def _cancel(self, number: int) -> None:
        if number in self.waiting:
            self.waiting.remove(number)
            self.tell(CANCELLED, number, True)
        elif number in self.running:
            self.running[number].cancel()

    def begin(self, number: int) -> None:
        deadline = self.deadlines[number]
        if deadline is not None and self.world.loop.now >= deadline:
            self.tell(RETURNED, number, None)
            return
        label = self.labels[number]
        terms = self.terms.pop(number, None)
        self.begun[number] = self.world.loop.now
        self.running[number] = Run(self, number, label, self.kinds[number], 0 if terms is None else terms[3])
        self.world.began(label)

    def has_thread(self) -> bool:
        """Whether fewer plain calls run than there are threads: those that are aside do not count."""
        runs = sum(run.kind == Kind.THREAD and not run.is_aside for run in self.running.values())
        return runs < self.world.threads

    def admit(self) -> None:
        """Let plain calls go on that can."""
        while self.back and self.has_thread():
            self.running[self.back.popleft()].is_aside = False

    def ended(self, run: Run, op: int, body: Any) -> None:
        """Answer a call."""
        del self.running[run.number]
        if run.number in self.back:
            self.back.remove(run.number)
        run.drop_all()
        self.tell(op, run.number, body)
        self.admit()

    def exit(self) -> None:
        self.state = "gone"
        self.running.clear()
        self.world.loop.call_soon(self._on_exit, Exit(self.code))
