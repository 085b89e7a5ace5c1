"""Calls of every kind in random mixture, and a record of what became of each.

A line of the record: number, kind, how often it may run, ns, flags, and the outcome in words. Flags: c, the program has cancelled
it; z, the runner was closing. Another file has the number and the time of each submission, before it.
"""

import asyncio
import contextlib
import gc
import random
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import percore
from percore._scheduler.streaming import PATIENCE
from tests.chaos import calls

LIMIT: Final = 30.0
"""Seconds after which something counts as hung."""

_RETRIES: Final = calls.RETRIES
_CANCELLED: Final = 0.08
_COLLECTED: Final = 0.005
_PAUSED: Final = 0.002


@dataclass(frozen=True, slots=True)
class Wish:
    """A single call."""

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


def _seconds(decide: random.Random) -> float:
    return decide.random() ** 3 / 20


SINGLE: Final[dict[str, tuple[float, Callable[[random.Random, int], Wish]]]] = {
    "task": (24, lambda decide, _: Wish(calls.task, (_seconds(decide),))),
    "thread": (20, lambda decide, _: Wish(calls.thread, (decide.randrange(1_000_000),))),
    "stubborn": (3, lambda *_: Wish(calls.stubborn)),
    "awaitable": (3, lambda *_: Wish(calls.awaitable)),
    "collects": (2, lambda *_: Wish(calls.collects)),
    "large_result": (4, lambda decide, _: Wish(decide.choice([calls.large_result, calls.large_result_of_task]))),
    "large_argument": (4, lambda _, uuid: Wish(calls.large_argument, (calls.pattern(uuid),))),
    "echo": (3, lambda _, uuid: Wish(calls.echo, (bytearray(calls.pattern(uuid)),))),
    "failing": (5, lambda *_: Wish(calls.failing)),
    "exiting": (1, lambda *_: Wish(calls.exiting)),
    "unpicklable": (2, lambda *_: Wish(calls.unpicklable)),
    "retried": (5, lambda decide, _: Wish(calls.task, (_seconds(decide),), {"retries": _RETRIES})),
    "retried_argument": (2, lambda _, uuid: Wish(calls.large_argument, (calls.pattern(uuid),), {"retries": _RETRIES})),
    "flaky": (
        4,
        lambda decide, _: Wish(
            calls.flaky,
            options={
                "retries": _RETRIES,
                "retry_on": (percore.WorkerDied, ConnectionError),
                "backoff": decide.choice([0.0, 0.01, lambda failed: failed / 200]),
            },
        ),
    ),
    "slow": (4, lambda decide, _: Wish(calls.slow, (_seconds(decide),), {"timeout": 0.005})),
    "slow_in_thread": (2, lambda decide, _: Wish(calls.slow_in_thread, (_seconds(decide),), {"timeout": 0.005})),
    "slow_and_retried": (
        2,
        lambda decide, _: Wish(
            calls.slow_in_thread,
            (_seconds(decide),),
            {"timeout": 0.005, "retries": _RETRIES, "retry_on": (TimeoutError, percore.WorkerDied)},
        ),
    ),
    "doomed": (1, lambda *_: Wish(calls.slow, (0.005,), {"hard_timeout": 0.01})),
    "doomed_in_thread": (1, lambda *_: Wish(calls.slow_in_thread, (0.005,), {"hard_timeout": 0.01, "retries": _RETRIES})),
    "stuck": (0.2, lambda decide, _: Wish(decide.choice([calls.stuck, calls.stuck_in_thread]), (), {"hard_timeout": 0.05})),
    "impatient": (3, lambda decide, _: Wish(calls.task, (_seconds(decide),), {"queue_timeout": decide.choice([0.001, 0.02])})),
    "impatient_in_thread": (
        3,
        lambda decide, _: Wish(calls.slow_in_thread, (_seconds(decide),), {"queue_timeout": 0.005, "retries": _RETRIES}),
    ),
    "impatient_argument": (
        1,
        lambda _, uuid: Wish(calls.large_argument, (calls.pattern(uuid),), {"queue_timeout": 0.005, "timeout": 1000.0}),
    ),
    "keyed": (10, lambda decide, _: _keyed(calls.keyed, f"key{decide.randrange(3)}")),
    "keyed_in_thread": (6, lambda decide, _: _keyed(calls.keyed_in_thread, f"key{decide.randrange(3)}")),
    "rated": (4, lambda decide, _: _rated(calls.rated, decide)),
    "rated_in_thread": (2, lambda decide, _: _rated(calls.rated_in_thread, decide, retries=_RETRIES)),
}


def _keyed(fn: Callable[..., Any], key: str) -> Wish:
    return Wish(fn, (key,), {"key": key})


def _rated(fn: Callable[..., Any], decide: random.Random, **options: Any) -> Wish:
    key = decide.choice(list(calls.RATES))
    return Wish(fn, (key,), {"key": key, "rate": calls.RATES[key], **options})


MAPS: Final[dict[str, tuple[int, Callable[..., Any], int, dict[str, Any]]]] = {
    "tiny": (40, calls.tiny, 1000, {}),
    "tiny_pair": (15, calls.tiny_pair, 500, {}),
    "tiny_failing": (8, calls.tiny_failing, 300, {}),
    "tiny_retried": (10, calls.tiny, 500, {"retries": _RETRIES}),
    "item": (15, calls.item, 200, {}),
    "item_in_time": (4, calls.item, 100, {"timeout": 1000.0}),
    "item_begun_in_time": (4, calls.item, 100, {"queue_timeout": 1000.0}),
    "keyed_item": (8, calls.keyed_item, 100, {"key": calls.key_of}),
    "large_item": (5, calls.large_result, 20, {}),
}
SHAPES: Final = {"list": 3, "pairs": 5, "stream": 4, "left": 2, "collected": 1, "cancelled": 1}
CALLERS: Final = (
    calls.caller,
    calls.caller_in_thread,
    calls.caller_by_maps,
    calls.caller_by_maps_in_thread,
    calls.caller_with_keys,
)
PARTS: Final = (calls.parts, calls.parts_of_task, calls.parts_passed_on, calls.parts_passed_on_by_task, calls.parts_at_a_rate)
ENDLESS: Final = frozenset({"stuck", "doomed", "doomed_in_thread"})
"""Single calls that may cost a worker its life, or in a thread of the program never end."""
UNITS: Final = {"single": 86, "nested": 4, "map": 6, "stream": 3, "broadcast": 1}


class Load:
    """The calls of one round, without single ones of the kinds `omitted`."""

    def __init__(self, runner: percore.Runner, seed: str, folder: Path, room: int, omitted: frozenset[str] = frozenset()) -> None:
        self.runner = runner
        self._weights = {kind: weight for kind, (weight, _) in SINGLE.items() if kind not in omitted}
        self.last = 0
        self.ended = 0
        self.is_closing = False
        self.pending: set[asyncio.Future[Any]] = set()
        """Futures that percore has to end."""
        self.tasks: set[asyncio.Task[None]] = set()
        """Of the program's own, around maps."""
        self._seed = seed
        self._room = asyncio.Semaphore(room)
        self._sets_rates = random.Random(f"{seed}/rates").random() < 0.5
        """Whether the program sets the rates of keys, for nested calls too, or the options of calls do."""
        for key in calls.RATES if self._sets_rates else ():
            runner.set_rate(key, calls.RATES[key])
        self._record = open(folder / "outcomes", "w", encoding="ascii")  # noqa: SIM115  # closed by `end`
        self._submitted = open(folder / "submitted", "w", encoding="ascii")  # noqa: SIM115  # likewise

    def submits(self, uuid: int) -> None:
        """A call is about to be submitted."""
        self._submitted.write(f"{uuid} {time.monotonic_ns()}\n")

    async def feed(self, most: int, is_over: Callable[[], bool]) -> None:
        """Submit until there are so many calls."""
        while self.last < most and not is_over():
            await self._room.acquire()
            self.submit()

    def submit(self) -> None:
        """One call, or one map."""
        uuid = self.last + 1
        decide = random.Random(f"{self._seed}/{uuid}")
        if decide.random() < _COLLECTED:
            gc.collect()
        kind = decide.choices(list(UNITS), list(UNITS.values()))[0]
        if decide.random() < _PAUSED:
            key = decide.choice(list(calls.RATES))
            with contextlib.suppress(percore.RunnerClosed):
                rates = [calls.RATES[key] if self._sets_rates else None, calls.RATES[key], calls.SLOWER[key]]
                self.runner.set_rate(key, decide.choice(rates), after=decide.random() / 20)
        if kind == "single":
            self._submit_single(uuid, decide)
        elif kind == "nested":
            self.last = uuid + 2
            self._add(self._nested(uuid, decide))
        elif kind == "map":
            self._add(Mapping(self, uuid, decide).run())
        elif kind == "stream":
            self.last = uuid
            self._add(self._stream(uuid, decide))
        else:
            self.last = uuid
            self._add(self._broadcast(uuid))

    def _submit_single(self, uuid: int, decide: random.Random) -> None:
        self.last = uuid
        kind = decide.choices(list(self._weights), list(self._weights.values()))[0]
        wish = SINGLE[kind][1](decide, uuid)
        submit = self.runner.options(**wish.options).submit if wish.options else self.runner.submit
        context = copy_context()
        context.run(calls.NUMBER.set, uuid)
        self.submits(uuid)
        try:
            future: asyncio.Future[Any] = context.run(submit, wish.fn, uuid, *wish.args)
        except (percore.RunnerClosed, percore.RunnerFull) as error:
            self.note(uuid, kind, 0, words_of(error))
            asyncio.get_running_loop().call_later(0.01, self._room.release)  # what is under way has to end, in this very loop
            return
        attempts = wish.options.get("retries", 0) + 1
        cancelling: list[int] = []
        future.add_done_callback(partial(self._done, uuid, kind, attempts, cancelling))
        self.pending.add(future)
        if decide.random() < _CANCELLED:
            asyncio.get_running_loop().call_later(decide.random() / 50, self._cancel, future, cancelling)

    def _cancel(self, future: asyncio.Future[Any], cancelling: list[int]) -> None:
        cancelling.append(1)
        future.cancel()

    def _done(self, uuid: int, kind: str, attempts: int, cancelling: list[int], future: asyncio.Future[Any]) -> None:
        self.pending.discard(future)
        words = "cancelled" if future.cancelled() else words_of(future.exception() or future.result())
        self.note(uuid, kind, attempts, words, is_cancelled=bool(cancelling))
        self._room.release()

    def note(self, uuid: int, kind: str, attempts: int, words: str, *, is_cancelled: bool = False) -> None:
        """A call has ended."""
        self.ended += 1
        flags = ("c" if is_cancelled else "") + ("z" if self.is_closing else "") or "-"
        self._record.write(f"{uuid} {kind} {attempts} {time.monotonic_ns()} {flags} {words}\n")

    def _add(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._end_task)

    def _end_task(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self._room.release()

    async def _stream(self, uuid: int, decide: random.Random) -> None:
        """Take a stream to its end, or leave it early in one of several ways. Its items are right, in order and without a gap."""
        count = decide.randint(1, 60)
        fn: Any = decide.choice(PARTS)
        options: dict[str, Any] = {"prefetch": decide.choice([1, 4, 16]), "key": decide.choice([None, "stream"])}
        arguments: tuple[Any, ...] = (uuid, count, decide.choice([0.0, 0.0005]))
        if fn is calls.parts_at_a_rate:
            key = decide.choice(list(calls.RATES))
            options |= {"key": key, "rate": calls.RATES[key]}
            arguments = (*arguments, key)
        leave = decide.choice(["end", "end", "break", "drop", "cancel"])
        most = decide.randint(1, count) if leave in ("break", "drop") else count + 1
        pause = decide.choice([0.0, 0.0, 2 * PATIENCE])  # then its generator gives its place back
        taken = 0
        words = "dropped"
        self.submits(uuid)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(decide.random() / 50 if leave == "cancel" else None):
                try:
                    stream = self.runner.options(**options).stream(fn, *arguments)
                    async for item in stream:
                        if item != calls.part(uuid, taken):
                            words = f"gap {taken}"
                            break
                        taken += 1
                        words = f"value {calls.answer(uuid)}"
                        if taken == most:
                            break
                        if pause and taken % 8 == 1:
                            await asyncio.sleep(pause)
                    else:
                        words = words if taken == count else f"ended after {taken} of {count}"
                    if leave == "break":
                        await stream.aclose()
                    del stream
                except percore.PercoreError as error:
                    words = words_of(error)
        self.note(uuid, "stream", 1, words)

    async def _nested(self, uuid: int, decide: random.Random) -> None:
        """A call that makes two calls. If it has not told of them, they may have run or not."""
        fn: Any = decide.choice(CALLERS)
        told: list[Any] = []
        context = copy_context()
        context.run(calls.NUMBER.set, uuid)
        is_cancelled = decide.random() < _CANCELLED
        for number in range(3):
            self.submits(uuid + number)
        runner: Any = self.runner
        arguments: tuple[Any, ...] = (_seconds(decide), decide.randrange(1_000_000))
        if is_keyed := fn is calls.caller_with_keys:
            rate = decide.choice([None, *calls.RATES]) if self._sets_rates else None
            arguments = f"key{decide.randrange(3)}", rate
            if decide.random() < 0.5:  # whoever has one of the other keys waits for nobody, so that no callers wait for each other
                runner = runner.options(key="caller")
        try:
            future = context.run(runner.submit, fn, uuid, *arguments)
            self.pending.add(future)
            future.add_done_callback(self.pending.discard)
            if is_cancelled:
                asyncio.get_running_loop().call_later(decide.random() / 50, future.cancel)
            value, told = await future
            words = words_of(value)
        except asyncio.CancelledError:
            words = "cancelled"
        except percore.PercoreError as error:
            words = words_of(error)
        self.note(uuid, "caller", 1, words, is_cancelled=is_cancelled)
        for number in (1, 2):
            attempts = _RETRIES + 1 if is_keyed and number == 1 else 1
            self.note(uuid + number, "nested", attempts, words_of(told[number - 1]) if told else "dropped")

    async def _broadcast(self, uuid: int) -> None:
        attempts = len(self.runner.statistics().workers) + 1  # one may be about to hand over to the next
        self.submits(uuid)
        try:
            values = await self.runner.broadcast(calls.everywhere, uuid)
        except Exception as error:
            self.note(uuid, "everywhere", attempts, words_of(error))
        else:
            self.note(uuid, "everywhere", attempts, " ".join(["all", *map(str, values)]))

    def end(self) -> int:
        """Close the record. How many calls have not ended."""
        hung = len(self.pending) + len(self.tasks)
        self._record.close()
        self._submitted.close()
        return hung


class Mapping:
    """A map and what becomes of its items: `dropped`, those that were pulled and not given; `unpulled`."""

    def __init__(self, load: Load, first: int, decide: random.Random) -> None:
        self._load = load
        self._decide = decide
        self._kind = decide.choices(list(MAPS), [weight for weight, *_ in MAPS.values()])[0]
        _, self._fn, most, options = MAPS[self._kind]
        self._shape = decide.choices(list(SHAPES), list(SHAPES.values()))[0]
        self._options = {name: value for name, value in options.items() if name != "key"}
        self._how: dict[str, Any] = {name: value for name, value in options.items() if name == "key"}
        self._uuids = range(first, first + decide.randint(1, most))
        self._pulled = self._given = 0
        self._told: set[int] = set()
        self._input_ended = asyncio.Event()
        load.last = self._uuids[-1]

    async def run(self) -> None:
        """Use the map in its shape; then every number has its line, but for those that the map has lost."""
        is_over = False
        try:
            is_over = await getattr(self, f"_{self._shape}")()
        except (percore.PercoreError, LookupError) as error:
            self._fail(error)
        for place, uuid in enumerate(self._uuids):
            if place >= self._pulled:
                self._note(uuid, "unpulled")
            elif not is_over and uuid not in self._told:
                self._note(uuid, "dropped")

    def _note(self, uuid: int, words: str) -> None:
        self._told.add(uuid)
        self._load.note(uuid, self._kind, self._options.get("retries", 0) + 1, words)

    def _fail(self, error: Exception) -> None:
        """The map has raised. A stream does so in the place of the item; else it is known of a death alone whose it was."""
        if self._shape == "stream" and not isinstance(error, percore.RunnerClosed) and self._given < self._pulled:
            self._note(self._uuids[self._given], words_of(error))

    def _inputs(self) -> Any:
        """The arguments, pulled one by one."""
        return self._pull_slowly() if self._decide.random() < 0.2 else self._pull()

    def _pull(self) -> Iterator[Any]:
        try:
            for uuid in self._uuids:
                self._pulled += 1
                self._load.submits(uuid)
                yield (uuid, bytes(uuid % 200)) if self._fn is calls.tiny_pair else uuid
        finally:
            self._input_ended.set()

    async def _pull_slowly(self) -> AsyncIterator[Any]:
        for value in self._pull():
            if self._decide.random() < 0.05:
                await asyncio.sleep(0.001)
            yield value

    def _map(self, **how: Any) -> Any:
        runner = self._load.runner
        verbs = runner.options(**self._options) if self._options else runner
        if self._decide.random() < 0.2:
            how["window"] = self._decide.choice([1, 10, 200])
        if self._fn is calls.tiny_pair:
            return verbs.starmap(self._fn, self._inputs(), **how, **self._how)
        if self._shape == "pairs":
            return verbs.map_items(self._fn, self._inputs(), **how, **self._how)
        return verbs.map(self._fn, self._inputs(), **how, **self._how)

    def _give(self, value: Any) -> None:
        self._note(self._uuids[self._given], words_of(value))
        self._given += 1

    async def _list(self) -> bool:
        for value in await self._map():
            self._give(value)
        return True

    async def _pairs(self) -> bool:
        if self._fn is calls.tiny_pair:
            return await self._list()
        async with self._map(ordered=False, return_exceptions=True) as pairs:
            async for uuid, value in pairs:
                self._note(uuid, words_of(value))
        return True

    async def _stream(self) -> bool:
        async for value in self._map():
            self._give(value)
        return True

    async def _left(self) -> bool:
        most = self._decide.randint(1, len(self._uuids))
        with contextlib.suppress(percore.WorkerDied, LookupError):
            async with self._map() as values:
                async for value in values:
                    self._give(value)
                    if self._given == most:
                        break
        return False

    async def _collected(self) -> bool:
        """Nobody closes it: it is collected, half used, and closes its input."""
        values = aiter(self._map())
        self._give(await anext(values))
        del values
        gc.collect(0)
        async with asyncio.timeout(LIMIT):
            await self._input_ended.wait()
        return False

    async def _cancelled(self) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._decide.random() / 50):
                for value in await self._map():
                    self._give(value)
                return True
        return False


def words_of(outcome: Any) -> str:
    """An outcome in words without blanks in them."""
    match outcome:
        case percore.WorkerDied():
            return f"died {int(outcome.started)} {outcome.pid} {outcome.attempts}"
        case percore.RunnerClosed():
            return "closed"
        case percore.RunnerFull():
            return "full"
        case percore.RemoteError():
            return f"remote {outcome.type_name}"
        case LookupError() | ConnectionError():
            return f"error {outcome.args[0]}"
        case TimeoutError():
            return "timeout"
        case BaseException():
            return f"{type(outcome).__name__} {outcome!r}".replace("\n", " ")
        case bytes() | bytearray():
            return f"bytes {len(outcome)} {zlib.crc32(outcome)}"
        case (value, size):
            return f"pair {value} {size}"
        case _:
            return f"value {outcome}"
