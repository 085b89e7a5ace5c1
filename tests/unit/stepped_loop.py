"""A loop whose steps a test chooses, and the seam to workers that do one thing at a time: parts of `call_orders`."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final

from percore._engines.threads.references import References
from percore._protocol.interfaces import Exit
from percore._protocol.messages import is_call

if TYPE_CHECKING:
    from tests.unit.call_orders import World
    from tests.unit.stepped_workers import StepWorker

MOST_TURNS: Final = 2000


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
        before = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(
            firstiter=self._asyncgen_firstiter_hook,  # type: ignore[attr-defined]
            finalizer=self._asyncgen_finalizer_hook,  # type: ignore[attr-defined]
        )
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*before)

    def settle(self, step: Callable[[], object] | None = None) -> None:
        """Take a step, run what is due, and what follows from it."""
        with self.running():
            if step is not None:
                step()
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

    def catch_up(self) -> None: ...

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


class StepEngine:
    """Starts workers that do nothing by themselves. Implements `Engine`."""

    no_place = ""
    sees_starts = True
    rouse = None

    def __init__(self, world: "World", loop: StepLoop) -> None:
        self.world = world
        self.store = world.store = References(loop)

    def start(self, index: int, generation: int, on_exit: Callable[[Exit], None], _sockets: Any) -> "StepWorker":
        from tests.unit.stepped_workers import StepWorker

        worker = StepWorker(self.world, index, generation, on_exit)
        self.world.workers.append(worker)
        return worker

    def renew(self) -> None: ...

    def resize(self, _workers: int) -> None: ...

    async def aclose(self) -> None:
        assert not self.store.in_use
