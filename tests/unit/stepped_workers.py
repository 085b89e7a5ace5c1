"""A loop whose steps a test chooses, and workers that do one thing at a time, when they are told to: parts of `call_orders`.

A worker here is a small model of a real one. It does not run code: it reads one message, begins, answers, gets ready, dies.
"""

import asyncio
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from percore._engines.threads.references import References
from percore._protocol.interfaces import Exit, Fate
from percore._protocol.messages import (
    BATCH,
    BEGIN_BY,
    CANCEL,
    CANCELLED,
    CREDIT,
    DRAIN,
    DRAINING,
    ENDED,
    FINISH,
    ID_MASK,
    ITEMS,
    READY,
    RECALL,
    RETURNED,
    TERMS,
    UNREADY,
    VALUE,
    WITHDRAW,
    Kind,
    is_call,
)
from tests.unit.stepped_nested import StepNested

if TYPE_CHECKING:
    from tests.unit.call_orders import World

MOST_TURNS: Final = 2000
MOST_ITEMS: Final = 3
"""Items that a generator yields at most."""


class Nothing:
    """A selector that has nothing."""

    def select(self, _timeout: float | None) -> list[Any]:
        return []


class StepLoop(asyncio.BaseEventLoop):
    """An event loop without descriptors, whose clock the test moves."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self._selector = Nothing()
        self._clock_resolution = 1e-6
        self.faults: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _, context: self.faults.append(context))

    def time(self) -> float:
        return self.now

    def _process_events(self, _events: list[Any]) -> None: ...

    def _write_to_self(self) -> None: ...

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the block's code think that it runs in this loop."""
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)

    def settle(self) -> None:
        """Run what is due, and what follows from it."""
        with self.running():
            for _ in range(MOST_TURNS):
                if not (self._ready or self._is_due()):  # type: ignore[attr-defined]
                    return
                self._run_once()  # type: ignore[attr-defined]
        raise AssertionError("the loop never comes to rest")

    def _is_due(self) -> bool:
        return any(timer.when() <= self.now for timer in self._scheduled)  # type: ignore[attr-defined]

    def timers(self) -> list[asyncio.TimerHandle]:
        """The timers that run, by time."""
        return sorted(timer for timer in self._scheduled if not timer.cancelled())  # type: ignore[attr-defined]

    def suspend(self) -> None:
        """Let a week pass in which nobody has run."""
        self.now += 7 * 86_400.0

    def expire(self) -> None:
        """Move the clock to the first timer."""
        self.now = max(self.now, self.timers()[0].when()) + 1e-3


class StepChannel:
    """The supervisor's side of a channel to a worker that reads when the test says so."""

    own: ClassVar[dict[int, Any]] = {}
    sent = received = 0

    def __init__(self, worker: "StepWorker") -> None:
        self.worker = worker
        self.is_open = False

    @property
    def waits_since(self) -> float:
        return self.worker.waits_since

    def open(self, on_frame: Callable[..., None], on_broken: Callable[..., None], on_batch: Callable[[], None]) -> None:
        self.is_open = True
        self.on_frame, self.on_broken, self.on_batch = on_frame, on_broken, on_batch

    def send(self, op: int, number: int, body: Any) -> None:
        worker = self.worker
        if not worker.inbox:
            worker.waits_since = worker.world.loop.now
        if is_call(op):
            worker.labels[number] = worker.world.label_of(body)
        worker.inbox.append((op, number, body))

    def load(self, payload: Any) -> Any:
        return self.worker.world.store.received(payload)

    def read(self, payload: Any) -> Any:
        return self.worker.world.store.read(payload)

    def release(self, _payload: Any) -> None: ...

    def receive(self) -> None:
        """Deliver what the worker has sent."""
        messages, self.worker.outbox = self.worker.outbox, []
        self.worker.has_news = False
        if not self.is_open:
            return
        try:
            if messages:
                self.on_frame(messages)
            self.on_batch()
        except BaseException as error:  # a real channel breaks; here every message was right
            self.worker.world.broken.append(error)
            self.on_broken(error)

    def has_read(self) -> bool:
        return not self.worker.inbox

    def lag(self) -> float:
        return 0.0


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
        self.labels: dict[int, int] = {}
        self.begun: dict[int, float] = {}
        """When each call has begun."""
        self.running: dict[int, bool] = {}
        """The calls that run, each with whether it was cancelled."""
        self.waiting: deque[int] = deque()
        """Plain calls that wait for the thread."""
        self.kinds: dict[int, int] = {}
        self.begin_by: float | None = None
        """When the calls that follow must have begun."""
        self.deadlines: dict[int, float | None] = {}
        self.nested = StepNested(self)
        self._handlers: dict[int, Callable[[int, Any], None]] = {
            BEGIN_BY: self._note_begin_by,
            TERMS: self._note_terms,
            CREDIT: self._credit,
            CANCEL: self._cancel,
            RECALL: self._recall,
            WITHDRAW: self._withdraw,
            DRAIN: self._drain,
            FINISH: self._finish,
            **self.nested.handlers,
        }
        self.terms: dict[int, int] = {}
        """The first credits of streams that are about to be sent."""
        self.credits: dict[int, int] = {}
        """How many more items each stream may produce."""
        self.produced: dict[int, int] = {}
        self.state = "starting"
        self.code = 0
        self.waits_since = 0.0
        self.is_stuck = False
        """Whether it does nothing any more until it is killed, as a stopped or blocked one."""

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

    def strikes(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """What may happen to this worker."""
        name = f"w{self.index}.{self.generation}"
        if not self.is_stuck:
            yield f"sticks {name}", self.stick
        yield f"dies {name}", self.kill
        if self.state == "starting":
            yield f"fails {name}", self.fail
        elif self.state == "serving":
            yield f"drains {name}", partial(self.kill, signal.SIGTERM)
        if self.state in ("serving", "draining") and not self.is_stuck:
            yield from self.nested.events(name, [number for number, is_cancelled in self.running.items() if not is_cancelled])

    def stick(self) -> None:
        self.is_stuck = True

    def is_overdue(self) -> bool:
        """Whether the supervisor has to end it, since it does not end by itself."""
        member = next((one for one in self.world.supervisor.members if one.worker is self), None)
        if member is None or not self.is_stuck:
            return False
        has_hard_limit = any("hard_timeout" in self.world.case.options_of(self.labels[number]) for number in self.running)
        return has_hard_limit or member.life.deadline(has_calls=bool(member.calls)) is not None

    def steps(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """What can happen in this worker now."""
        name = f"w{self.index}.{self.generation}"
        if self.state == "gone":
            return
        if self.channel.is_open and (self.outbox or self.has_news):
            yield f"s hears {name}", self.channel.receive
        if self.state == "dying":
            yield f"{name} is gone", self.exit
        elif self.is_stuck:
            return
        elif self.state == "starting":
            yield f"{name} ready", self.get_ready
        else:
            yield from self._own_steps(name)

    def _own_steps(self, name: str) -> Iterator[tuple[str, Callable[[], object]]]:
        if self.inbox:
            yield f"{name} reads", self.read
        asking = set(self.nested.asked.values())
        idle = asking | {number for number, some in self.credits.items() if not some}
        if self.waiting and not any(self.kinds[number] == Kind.THREAD for number in self.running.keys() - idle):
            yield f"{name} begins", lambda: self.begin(self.waiting.popleft())
        for number in list(self.running):
            if self.credits.get(number, 0) and self.produced[number] < MOST_ITEMS and not self.running[number]:
                yield f"{name} yields {self.labels[number]}", partial(self.produce, number)
            if number in asking or (number in self.credits and self.produced[number] < MOST_ITEMS and not self.running[number]):
                continue  # it waits for its nested calls, or has more to yield
            yield f"{name} answers {self.labels[number]}", partial(self.answer, number)
            if self.running[number]:
                yield f"{name} answers {self.labels[number]} all the same", partial(self.answer, number, suppresses=True)
        yield from self.nested.steps(name)
        if self.state == "finished" or (self.state == "draining" and not (self.running or self.waiting)):
            yield f"{name} is gone", self.exit

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
        elif op in self._handlers:
            self._handlers[op](number, body)
        if not self.inbox:
            self.waits_since, self.has_news = 0.0, True

    def _note_begin_by(self, _number: int, body: float | None) -> None:
        self.begin_by = body

    def _note_terms(self, number: int, body: Any) -> None:
        self.terms[number] = 0 if body is None else body[3]

    def _credit(self, number: int, items: int) -> None:
        if number in self.credits:
            self.credits[number] += items

    def _recall(self, wanted: int, _body: Any) -> None:
        self._return(list(self.waiting)[-wanted:] if wanted else [])
        self.tell(RETURNED, 0, None)

    def _withdraw(self, number: int, _body: Any) -> None:
        self._return([number] if number in self.waiting else [])

    def _finish(self, _number: int, _body: Any) -> None:
        self.state = "finished"

    def _take(self, op: int, number: int) -> None:
        assert op != BATCH
        self.kinds[number] = self.world.kind
        self.deadlines[number] = self.begin_by
        self.produced[number] = 0
        self.credits.pop(number, None)
        if prefetch := self.terms.pop(number, 0):
            self.credits[number] = prefetch
        if self.state != "serving":
            self.tell(RETURNED, number, None)
        elif self.world.kind == Kind.TASK:
            self.begin(number)
        else:
            self.waiting.append(number)

    def _return(self, calls: list[int]) -> None:
        for number in reversed(calls):
            self.waiting.remove(number)
            self.tell(RETURNED, number, None)

    def _drain(self, _number: int, _body: Any) -> None:
        if self.state != "serving":
            return
        self.state = "draining"
        self.tell(DRAINING, 0, None)
        while self.waiting:
            self.tell(RETURNED, self.waiting.popleft(), None)

    def _cancel(self, number: int, _body: Any) -> None:
        if number in self.waiting:
            self.waiting.remove(number)
            self.tell(CANCELLED, number, True)
        elif number in self.running and (self.kinds[number] == Kind.TASK or number in self.credits):
            self.running[number] = True
            self.nested.drop(number)

    def begin(self, number: int) -> None:
        deadline = self.deadlines[number]
        if deadline is not None and self.world.loop.now >= deadline:
            self.tell(RETURNED, number, None)
            return
        self.begun[number] = self.world.loop.now
        self.running[number] = False
        self.world.ran[self.labels[number]] += 1

    def produce(self, number: int) -> None:
        """Yield an item of a stream."""
        self.tell(ITEMS, number, (0, -1.0, [self.produced[number]], []))
        self.produced[number] += 1
        self.credits[number] -= 1

    def answer(self, number: int, *, suppresses: bool = False) -> None:
        is_cancelled = self.running.pop(number) and not suppresses
        is_stream = self.credits.pop(number, None) is not None
        op = CANCELLED if is_cancelled else ENDED if is_stream else VALUE
        self.tell(op, number, None if is_cancelled or is_stream else self.labels[number])

    def exit(self) -> None:
        self.state = "gone"
        self.running.clear()
        self.world.loop.call_soon(self._on_exit, Exit(self.code))

    def shape(self) -> object:
        """All that decides what it does next."""
        labels = self.labels

        def of(message: tuple[int, int, Any]) -> tuple[int, Any]:
            return message[0], labels.get(message[1], message[1] & ID_MASK if message[0] == RECALL else 0)

        now = self.world.loop.now
        return (
            (self.index, self.state, self.code, self.is_stuck, self.has_news, bool(self.waits_since)),
            (tuple(map(of, self.inbox)), tuple(map(of, self.outbox))),
            tuple((labels[one], how) for one, how in self.running.items()),
            (tuple(labels[one] for one in self.waiting), tuple(self.nested.asked), self.begin_by, tuple(self.credits.values())),
            frozenset((labels[one], round(now - when, 1)) for one, when in self.begun.items()),
        )


class StepEngine:
    """Starts workers that do nothing by themselves. Implements `Engine`."""

    no_place = ""
    sees_starts = True
    rouse = None

    def __init__(self, world: "World", loop: StepLoop) -> None:
        self.world = world
        self.store = world.store = References(loop)

    def start(self, index: int, generation: int, on_exit: Callable[[Exit], None], _sockets: Any) -> StepWorker:
        worker = StepWorker(self.world, index, generation, on_exit)
        self.world.workers.append(worker)
        return worker

    def renew(self) -> None: ...

    def resize(self, _workers: int) -> None: ...

    async def aclose(self) -> None:
        assert not self.store.in_use
