"""The real runner in a loop whose steps a test chooses, over workers that do one thing at a time, when they are told to.

Everything of the program's side is real: `Runner`, the supervisor and its decisions. A *step* is what a worker does, or the user,
or the clock; after each step the loop runs until it has nothing to do. A state is a path of steps, taken again from the start,
because a runner cannot be copied. Two paths to the same calls, workers, slots, queues and timers are one state.

From each state everything has to come to an end, if all go on fairly: each call is told once, and the truth; the changes and the
close end; no worker and no timer is left.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from operator import ge
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias
from unittest import mock

from percore import Rate, Runner, RunnerClosed, WorkerDied
from percore._common import options as runner_options
from percore._engines.threads.references import References
from percore._protocol.messages import Kind
from percore._runner.runner import State
from percore._testing.simulation import _virtual_clocks
from tests import jobs
from tests.contract import stream_jobs
from tests.unit.call_shapes import Shape, events_left
from tests.unit.call_states import check_full, check_relations
from tests.unit.stepped_calls import Ask, Child, Label
from tests.unit.stepped_loop import StepEngine, StepLoop
from tests.unit.stepped_users import Consumer
from tests.unit.stepped_workers import StepWorker

_UNHEARD: Final = "a generator failed while its stream was closed"
SAMPLED: Final = 53
"""Of the steps that lead to a state which was seen before, the part whose paths are kept to be compared."""
LONGEST_END: Final = 400
"""Steps that a fair end may take."""

PACES: Final = {"slowly": (Rate(1, per=2.0), 0.0), "later": (None, 1.5), "as asked": (None, 0.0)}
"""What the rate of the key "k" may become: a rate, and seconds until its calls begin."""


Path: TypeAlias = tuple[str, ...]


class Case(NamedTuple):
    """How a runner is used, and what may happen to it.

    Attributes:
        events: how often each thing may happen: "dies", "sticks", "fails", "drains", "cancels", "closes", "cuts", "reloads",
            "grows", "shrinks", "time", "suspends", "paces" (the rate of a key changes); to streams "leaves", "forgets"; what calls
            do "asks", "drops", "shuts", "abandons", "raises".
        calls: how many calls the user makes.
        options: those of the runner.
        of_call: those of each call, or those of several calls, which take turns. One with `prefetch` is a stream.
        kind: coroutines or plain functions.
        from_start: whether workers get ready as steps, too.
        as_pickle: whether the arguments are sent as a pickle.
        keys: the keys of the calls, by number; for the others `of_call` has it.
        streams: the calls that are streams.
        items: how many items each generator yields.
        asks: the nested calls that a call may make.
        depth: how deeply calls may be nested.
    """

    events: dict[str, int]
    calls: int = 3
    workers: int = 2
    options: dict[str, Any] = {}  # noqa: RUF012  # nobody changes it
    of_call: dict[str, Any] | tuple[dict[str, Any], ...] = {}  # noqa: RUF012
    kind: int = Kind.TASK
    from_start: bool = False
    as_pickle: bool = False
    keys: tuple[str, ...] = ()
    streams: frozenset[int] = frozenset()
    items: int = 3
    asks: tuple[Ask, ...] = ()
    depth: int = 1

    def options_of(self, label: Label) -> dict[str, Any]:
        """Return the options of this call. Nested calls have none."""
        if isinstance(label, str):
            return {}
        options = self.of_call if isinstance(self.of_call, dict) else self.of_call[label % len(self.of_call)]
        return {**options, "key": self.keys[label]} if label < len(self.keys) else options

    @property
    def is_strict(self) -> bool:
        """Whether no more coroutines run in a worker than it has places: none takes its place again before it has one."""
        has_streams = bool(self.streams) or self.has("prefetch") or any(ask.prefetch for ask in self.asks)
        has_hard_limit = self.has("hard_timeout") or any(ask.hard_timeout is not None for ask in self.asks)
        comes_back = bool({"cancels", "drops", "abandons", "cuts"} & self.events.keys()) or has_hard_limit
        return bool(self.asks) and not has_streams and not comes_back

    def has(self, option: str) -> bool:
        """Whether a call has this option."""
        return any(option in self.options_of(number) for number in range(self.calls))

    @property
    def counts_time(self) -> bool:
        """Whether it matters when a call was made, or has begun."""
        asked = any(ask.hard_timeout or ask.queue_timeout for ask in self.asks)
        return asked or any(map(self.has, ("hard_timeout", "queue_timeout", "rate", "backoff")))

    @property
    def has_keys(self) -> bool:
        """Whether calls have keys, whose workers go by their indexes."""
        return self.has("key") or any(ask.key is not None for ask in self.asks)


class StepRunner(Runner):
    """The runner of the latest world."""

    world: "ClassVar[World]"

    def _make_engine(self, loop: Any, *_: Any) -> Any:
        return StepEngine(self.world, loop)


@dataclass
class World:
    """A runner, its workers, and what has happened so far."""

    case: Case
    loop: StepLoop = field(default_factory=StepLoop)
    workers: list[StepWorker] = field(default_factory=list)
    calls: list[Any] = field(default_factory=list)
    cancelled: set[int] = field(default_factory=set)
    broken: list[BaseException] = field(default_factory=list)
    tasks: dict[str, asyncio.Task[Any]] = field(default_factory=dict)
    judges: bool = False
    """Whether a call is judged as soon as it has ended: states forget how it has ended."""
    judged: set[int] = field(default_factory=set)
    """The calls of the user that have ended, and were judged."""
    store: References = field(init=False)

    def __post_init__(self) -> None:
        case = self.case
        self.kind = case.kind
        self.is_strict, self.counts_time, self.has_keys = case.is_strict, case.counts_time, case.has_keys
        self.left = dict(case.events)
        self.ran: Counter[Label] = Counter()
        self.asked: dict[Label, Ask] = {}
        """The nested calls, by their labels."""
        self.told: dict[str, Any] = {}
        """What the callers of nested calls were told."""
        options = {"concurrency": 1, "threads": 1, "kill_after": 5.0, "start_timeout": 60.0, "blocked_after": None, **case.options}
        self.threads: int = options["threads"]
        self.concurrency: int = options["concurrency"]
        Clock.loop, StepRunner.world = self.loop, self
        with self.loop.running():
            self.runner: Runner = StepRunner(case.workers, **options)
        self.begin("start", self.runner.start())
        if not case.from_start:
            for worker in self.workers:
                worker.get_ready()
                worker.channel.receive()
            self.loop.settle()

    @property
    def supervisor(self) -> Any:
        return self.runner._supervisor

    def label_of(self, body: Any) -> Label:
        """Return the label of a call, which is its only argument."""
        label: Label = body[0] if type(body) is tuple else self.store.received(body).load()[-1]["value"]
        return label

    def begin(self, name: str, coroutine: Any) -> None:
        self.tasks[name] = self.loop.create_task(coroutine)
        self.loop.settle()

    def call(self, label: Label) -> Any:
        """Return the future of a call of the user."""
        return self.calls[int(label)]

    # What calls do

    def began(self, label: Label) -> None:
        self.ran[label] += 1
        call = self.calls[label] if isinstance(label, int) and label < len(self.calls) else None
        assert call is None or not call.done() or self.may_begin(label), f"call {label} begins after its caller was told its end"

    def may_begin(self, label: Label) -> bool:
        """Whether a call that has ended for its caller may still begin: its worker may not have heard of the end."""
        call = self.call(label)
        return call.cancelled() or isinstance(call.exception(), RunnerClosed)

    def traits(self, label: Label) -> object:
        """Return all in which calls of the user differ."""
        number = int(label)
        return repr(self.case.options_of(number)), number in self.case.streams

    def asks(self, caller: Label, ask: Ask) -> str:
        """Note that a call makes a nested call. Return its label."""
        label = f"{caller}.{sum(str(one).rpartition('.')[0] == str(caller) for one in self.asked)}"
        self.asked[label] = ask
        return label

    def was_told(self, child: Child, told: Any) -> None:
        """Note what the caller of a nested call was told, and judge it."""
        label, ask = child.label, self.asked[child.label]
        assert label not in self.told, f"{label} was answered twice"
        self.told[label] = told
        ran = self.ran[label]
        if isinstance(told, WorkerDied):
            assert told.attempts == ran, f"{label} began {ran} times, and its caller was told {told.attempts}"
            assert told.started is bool(ran) or (ran and ask.retries)
        elif isinstance(told, LookupError):
            assert ran
        elif isinstance(told, TimeoutError):
            may_end_so = ask.hard_timeout is not None or (ask.queue_timeout is not None and not ran)
            assert may_end_so, f"{label} began {ran} times: {told}"
        elif isinstance(told, RunnerClosed):
            assert self.is_closing(), "nobody closed the runner"
        elif isinstance(told, Exception):
            assert isinstance(told, ValueError | RuntimeError), repr(told)
            assert ask.key is not None, f"{label} was told {told!r}"
        elif ask.prefetch:
            assert told is None
            assert child.is_closing or child.arrived == self.case.items, f"{label} has ended after {child.arrived} items"
        else:
            assert told == label, "another call's result"

    def has_hard_limit(self, label: Label) -> bool:
        """Whether a call, or a nested call, has a `hard_timeout`."""
        if label in self.asked:
            return self.asked[label].hard_timeout is not None
        return "hard_timeout" in self.case.options_of(label)

    def is_closing(self) -> bool:
        return bool({"closes", "cuts"} & self.tasks.keys())

    # Steps

    def steps(self) -> list[tuple[str, Callable[[], object]]]:
        """What can happen now, in a steady order."""
        left, is_open = self.left, self.tasks["start"].done() and self.tasks["start"].exception() is None
        is_open &= not self.is_closing()
        found = list(self.fair())
        if is_open and len(self.calls) < self.case.calls:
            found.append(("submits", self.submit))
        if left.get("time") and self.loop.timers():
            found.append(("time", self.loop.expire))
        if left.get("suspends"):
            found.append(("suspends", self.loop.suspend))
        found += [(one, partial(self.close, one)) for one in ("closes", "cuts") if left.get(one) and one not in self.tasks]
        if is_open:
            found += [(event, partial(self.change, event)) for event in ("reloads", "grows", "shrinks") if left.get(event)]
            found += [(f"paces {how}", partial(self.pace, how)) for how in PACES if left.get("paces")]
        if left.get("cancels"):
            futures = [(n, call) for n, call in enumerate(self.calls) if not isinstance(call, Consumer)]
            found += [(f"cancels {n}", partial(self.cancel, n)) for n, call in futures if not call.done()]
        for one in self.consumers():
            found += [choice for choice in one.choices() if left.get(choice[0].split(" ")[0])]
        struck = [worker for worker in self.workers if worker.state not in ("gone", "dying")]
        return [*found, *((name, strike) for worker in struck for name, strike in worker.strikes() if left.get(name.split(" ")[0]))]

    def fair(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """What happens by itself."""
        for worker in self.workers:
            yield from worker.steps()
        for one in self.consumers():
            yield from one.steps()

    def consumers(self) -> list[Consumer]:
        return [call for call in self.calls if isinstance(call, Consumer)]

    def take(self, name: str, *, checks: bool = True) -> None:
        """Take one of the steps. `checks`: False if the same was checked before."""
        event = name.split(" ")[0]
        if name == "submits":
            step: Callable[[], object] | None = self.submit
        else:
            step = next((step for one, step in (self.steps() if event in self.left else self.fair()) if one == name), None)
        assert step is not None, f"{name} cannot happen"
        if event in self.left:
            self.left[event] -= 1
        self.loop.settle(step)
        if checks:
            self.check()

    def submit(self) -> None:
        number = len(self.calls)
        case = self.case
        options = case.options_of(number)
        if number in case.streams or "prefetch" in options:
            fn: Any = stream_jobs.anumbers if self.kind == Kind.TASK else stream_jobs.numbers
            streaming = self.runner.options(**{"prefetch": 2, **options})
            self.calls.append(Consumer(self, number, partial(streaming.stream, fn, number)))
            return
        view: Any = self.runner.options(**options) if options else self.runner
        self.calls.append(None)
        try:
            given: Any = {"value": number} if self.case.as_pickle else number
            fn = jobs.aecho if self.kind == Kind.TASK else jobs.echo
            self.calls[number] = view.submit(fn, **given) if self.case.as_pickle else view.submit(fn, given)
        except BaseException:
            self.calls.pop()
            raise

    def cancel(self, number: int) -> None:
        self.cancelled.add(number)
        self.calls[number].cancel()

    def close(self, event: str) -> None:
        self.begin_soon(event, self.runner.aclose(grace=None if event == "closes" else 0))

    def change(self, event: str) -> None:
        change = self.runner.reload() if event == "reloads" else self.runner.resize(self.case.workers + (event == "grows" or -1))
        self.begin_soon(f"{event} {self.left[event]}", change)

    def pace(self, how: str) -> None:
        rate, after = PACES[how]
        self.runner.set_rate("k", rate, after=after)

    def begin_soon(self, name: str, coroutine: Any) -> None:
        self.tasks[name] = self.loop.create_task(coroutine)

    # Ends

    def check(self) -> None:
        """What must hold after each step."""
        assert not self.broken, self.broken
        faults = [one for one in self.loop.faults if "raises" not in self.case.events or _UNHEARD not in one["message"]]
        assert not faults, faults
        assert not FAULTS, FAULTS
        for label, ran in self.ran.items():
            retries = self.asked[label].retries if label in self.asked else self.case.options_of(label).get("retries", 0)
            assert ran <= 1 + retries, f"call {label} ran {ran} times"
        for number, call in enumerate(self.calls if self.judges else ()):
            if number not in self.judged and call is not None and call.done():
                self.judge(number, call)
                self.judged.add(number)
        if self.runner._assembly is not None:
            check_relations(self)
        if self.is_strict:
            for worker in self.workers:
                tasks = [run for run in worker.running.values() if run.kind == Kind.TASK and not run.children]
                assert len(tasks) <= self.concurrency, f"{worker.name} runs {[run.label for run in tasks]}"

    def go_on(self, is_over: Callable[[], bool], *, takes: bool = True) -> None:
        """Let happen what happens by itself, fairly, until it is over. The clock moves when nothing else can.

        `takes`: whether the users of streams take items.
        """
        for _ in range(LONGEST_END):
            if is_over():
                return
            steps = [name for name, _ in self.fair() if takes or not name.startswith("takes ")]
            for name in steps:
                if name in dict(self.fair()):
                    self.take_fair(name)
            if not steps:
                assert self.loop.timers(), "nothing can happen any more"
                self.loop.expire()
                self.loop.settle()
                self.check()
        raise AssertionError("it never ends")

    def take_fair(self, name: str) -> None:
        with self.loop.running():
            dict(self.fair())[name]()
        self.loop.settle()
        self.check()

    def finish(self) -> None:
        """Let everything end, and judge it."""
        self.go_on(lambda: self.tasks["start"].done())
        if not self.is_anyone_stuck() and self.consumers() and not self.case.has("key"):  # whoever is slow holds up nobody
            calls = [call for call in self.calls if not isinstance(call, Consumer)]
            self.go_on(lambda: all(call.done() for call in calls), takes=False)
        self.go_on(lambda: not any(worker.is_overdue() for worker in self.workers))
        if not self.is_anyone_stuck():
            self.go_on(lambda: all(call.done() for call in self.calls) and self.changes_are_done())
            self.go_on(self.has_no_old_worker)
            self.go_on(lambda: not list(self.fair()))
            if not self.is_closing():
                check_full(self)
        if not {"closes", "cuts"} & self.tasks.keys() or (self.is_anyone_stuck() and "cuts" not in self.tasks):
            event = "cuts" if self.is_anyone_stuck() else "closes"
            self.close(event)
            self.loop.settle()
        if not self.is_anyone_stuck():  # a close ends streams, also those whose users take nothing
            self.go_on(lambda: self.tasks["closes"].done() if "closes" in self.tasks else self.tasks["cuts"].done(), takes=False)
        self.go_on(lambda: all(task.done() for task in self.tasks.values()) and all(call.done() for call in self.calls))
        for name, task in self.tasks.items():
            error = task.exception()
            assert error is None or name.split(" ")[0] not in ("closes", "cuts"), f"{name} raised {error!r}"
            is_own = type(error).__module__.startswith("percore") or (isinstance(error, LookupError) and name.startswith("leaves"))
            assert error is None or is_own, f"{name} raised {error!r}"
        assert all(worker.state == "gone" for worker in self.workers), "a worker is left"
        if self.runner._assembly is not None:
            assert not self.supervisor.members
            check_full(self)
            assert not self.supervisor.calls.waiting()
        assert not self.loop.timers(), f"timers run on: {self.loop.timers()}"
        for number, call in enumerate(self.calls):
            self.judge(number, call)

    def has_no_old_worker(self) -> bool:
        """Whether each worker has a slot: those that others have replaced have ended."""
        slots = [] if self.runner._assembly is None else self.supervisor.slots
        return not self.living() - {member.worker for slot in slots for member in (slot.current, slot.next) if member is not None}

    def living(self) -> set[StepWorker]:
        return {worker for worker in self.workers if worker.state != "gone"}

    def is_anyone_stuck(self) -> bool:
        """Whether a worker may keep its calls for ever: only a close with a limit ends it then."""
        return any(worker.is_stuck and worker.state not in ("gone", "dying") for worker in self.workers)

    def changes_are_done(self) -> bool:
        return all(task.done() for name, task in self.tasks.items() if name not in ("closes", "cuts"))

    def judge(self, number: int, call: Any) -> None:
        """The caller was told the truth."""
        ran = self.ran[number]
        if isinstance(call, Consumer):
            call.judge(ran)
            return
        if call.cancelled():
            assert number in self.cancelled, f"call {number} was cancelled by nobody"
            return
        error, options = call.exception(), self.case.options_of(number)
        if error is None:
            assert call.result() == number, "another call's result"
            assert ran, "a result of a call that never ran"
        elif isinstance(error, WorkerDied):
            assert error.attempts == ran, f"call {number} began {ran} times, and its caller was told {error.attempts}"
            may_differ = ran and options.get("retries")  # `started` tells of the last attempt
            assert error.started is bool(ran) or may_differ
        elif isinstance(error, LookupError):
            assert ran
        elif isinstance(error, TimeoutError):
            may_end_so = "hard_timeout" in options or ("queue_timeout" in options and not ran)
            assert may_end_so, f"call {number} began {ran} times: {error}"
        else:
            assert isinstance(error, RunnerClosed), repr(error)
            assert self.is_closing(), "nobody closed the runner"

    def abandon(self) -> None:
        """End it, whatever it is in, so that nothing of it is left."""
        with suppress(BaseException):
            self.begin("ends", self.runner.aclose(grace=0))
            for _ in range(LONGEST_END):
                for worker in self.workers:
                    worker.kill()
                    if worker.state == "dying":
                        worker.exit()
                self.loop.settle()
                if all(task.done() for task in self.tasks.values()):
                    break
                if self.loop.timers():
                    self.loop.expire()
        for task in self.tasks.values():
            if task.done() and not task.cancelled():
                task.exception()
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        for call in self.calls:
            if call.done() and not call.cancelled():
                call.exception()
        self.runner._phase = State.CLOSED  # one that a fault has kept from closing would warn
        self.loop.close()

    def shape(self) -> object:
        """All that decides what can happen next."""
        return Shape(self).written()


class Clock:
    """The time of the latest world."""

    loop: StepLoop | None = None

    def time(self) -> float:
        return 1000.0 if self.loop is None else self.loop.now


FAULTS: Final[list[str]] = []
"""What percore has logged as its own mistakes."""


class Watcher(logging.Handler):
    """Notes errors of percore itself: it isolates them, and reports them in the log."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.levelno >= logging.ERROR:
            FAULTS.append(f"{record.getMessage()} {record.exc_info and record.exc_info[1]!r}")


@contextmanager
def watched() -> Iterator[None]:
    """Give percore the clock of the worlds during the block, and note what it logs as its own mistakes."""
    logger, watcher = logging.getLogger("percore"), Watcher()
    logger.addHandler(watcher)
    logger.propagate = False  # each history logs its deaths
    try:
        # Each runner asks the system how many CPUs there are, which takes longer than some histories.
        with _virtual_clocks(Clock()), mock.patch.object(runner_options, "usable_cpus", return_value=2):  # type: ignore[arg-type]
            yield
    finally:
        logger.removeHandler(watcher)
        logger.propagate = True
        Clock.loop = None


@contextmanager
def world(case: Case, path: Sequence[str], *, is_known: bool = False) -> Iterator[World]:
    """Take the steps of a path in a new world. `is_known`: all but the last one were checked before, and so were the calls."""
    FAULTS.clear()
    one = World(case, judges=is_known)
    try:
        for number, name in enumerate(path, 1):
            one.take(name, checks=not is_known or number == len(path))
        yield one
    except BaseException as error:
        error.add_note("after: " + ", ".join(path))
        raise
    finally:
        one.abandon()


class Explored(NamedTuple):
    """What `explore` has seen.

    Attributes:
        states: how many states.
        steps: how many steps led to them; some led to a state that was seen before.
        is_whole: whether these are all states of the case.
        alike: some pairs of paths that led to the same state.
    """

    states: int
    steps: int
    is_whole: bool
    alike: list[tuple[Path, Path]]


def explore(case: Case, most: int) -> Explored:
    """Look at each state, up to so many, and let each come to its end.

    States in which less has happened come first. A state is not looked at if it was seen with as many events still to come or more:
    all that may follow was seen, too.
    """
    seen: dict[int, list[tuple[tuple[int, ...], Path]]] = {}
    by_events: dict[int, deque[Path]] = {0: deque([()])}
    alike = []
    states = steps = 0
    while by_events and states < most:
        events = min(by_events)
        if not (paths := by_events[events]):
            del by_events[events]
            continue
        path = paths.popleft()
        with world(case, path, is_known=True) as one:
            steps += 1
            left = events_left(one)
            others = seen.setdefault(hash(one.shape()), [])
            if any(all(map(ge, more, left)) for more, _ in others):
                if steps % SAMPLED == 0 and others[0][0] == left:
                    alike.append((path, others[0][1]))
                continue
            others.append((left, path))
            states += 1
            for name, _ in one.steps():
                by_events.setdefault(events + (name.split(" ")[0] in one.left), deque()).append((*path, name))
            one.finish()
    return Explored(states, steps, not any(by_events.values()), alike)


def is_alike(case: Case, one: Path, other: Path) -> bool:
    """Whether from two paths to one state the same states follow. If not, something which decides was left out of the state."""
    return _after(case, one) == _after(case, other)


def _after(case: Case, path: Path) -> set[object]:
    """Return the states that may follow, each with the events that are left."""
    with world(case, path) as one:
        names = [name for name, _ in one.steps()]
    following: set[object] = set()
    for name in names:
        with world(case, (*path, name), is_known=True) as one:
            following.add((one.shape(), events_left(one)))
    return following


def stroll(case: Case, choose: Callable[[int], int], longest: int = 60) -> list[str]:
    """Take steps as they come, up to the end of a history, and return them."""
    path: list[str] = []
    with world(case, ()) as one:
        one.judges = True
        try:
            for _ in range(choose(longest)):
                steps = one.steps()
                if not steps:
                    break
                by_itself = len(list(one.fair())) + (("submits", one.submit) in steps) if choose(3) else 0
                name = steps[choose(by_itself or len(steps))][0]
                path.append(name)
                one.take(name)
            one.finish()
        except BaseException as error:
            error.add_note("after: " + ", ".join(path))
            raise
    return path
