"""A user who takes the items of a stream one at a time, when a test says so: a part of `call_orders`."""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from percore import RunnerClosed, WorkerDied

if TYPE_CHECKING:
    from tests.unit.call_orders import World


class Consumer:
    """The user of one stream. To the explorer it looks like the future of a call."""

    def __init__(self, world: "World", number: int, make: Callable[[], Any]) -> None:
        """`make` returns the stream. It is called when the first item is wanted."""
        self._world = world
        self._number = number
        self._make = make
        self._stream: Any = None
        self.call: Any = None
        """The call of the stream; None: it is not made."""
        self._task: asyncio.Task[None] | None = None
        self._items: list[int] = []
        self._error: BaseException | None = None
        self._is_over = self.has_left = False

    def done(self) -> bool:
        return self._is_over

    def cancelled(self) -> bool:
        """Whether the user has left the stream."""
        return self.has_left

    def exception(self) -> BaseException | None:
        return self._error

    # Steps

    def steps(self) -> Iterator[tuple[str, Callable[[], object]]]:
        if not self._is_over and self._task is None:
            yield f"takes {self._number}", self.take

    def choices(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """What the user may do, as events of the case."""
        if self._is_over or self.call is None:
            return
        yield f"leaves {self._number}", self.leave
        if self._task is None:
            yield f"forgets {self._number}", self.forget
        else:
            yield f"cancels {self._number}", partial(self._world.cancel, self._number)

    def take(self) -> None:
        """Ask for the next item."""
        if self.call is None:
            try:
                self._stream = self._make()
            except RunnerClosed as error:
                self._error, self._is_over = error, True
                return
            self.call = self._stream._call
        self._task = self._world.loop.create_task(self._take())

    async def _take(self) -> None:
        try:
            self._items.append(await anext(self._stream))
        except StopAsyncIteration:
            self._is_over = True
        except asyncio.CancelledError:
            self._is_over = self.has_left = True
        except BaseException as error:  # as the judge wants it
            self._error, self._is_over = error, True
        finally:
            self._task = None

    def leave(self) -> None:
        """Close the stream."""
        self._is_over = self.has_left = True
        self._world.begin_soon(f"leaves {self._number}", self._stream.aclose())

    def forget(self) -> None:
        """Drop the last reference, as after a `break`."""
        self._is_over = self.has_left = True
        self._stream = None

    def cancel(self) -> None:
        """Cancel the task that waits for an item."""
        if self._task is not None:
            self._task.cancel()

    # Ends

    def judge(self, began: int) -> None:
        """The user was told the truth. `began`: how often the generator has begun."""
        assert self._items == [*range(len(self._items))], f"stream {self._number} has given {self._items}"
        if self.has_left:
            return
        if self._error is None:
            assert len(self._items) == self._world.case.items, f"stream {self._number} has ended after {self._items}"
        elif isinstance(self._error, WorkerDied):
            assert self._error.attempts == began, f"stream {self._number} has begun {began} times: {self._error!r}"
            assert self._error.started is bool(began)
        elif isinstance(self._error, LookupError):
            assert began
        else:
            assert isinstance(self._error, RunnerClosed), repr(self._error)
            assert self._world.is_closing(), "nobody closed the runner"

    def shape(self) -> object:
        own = self._is_over, self.has_left, self._task is None, len(self._items), type(self._error).__name__
        if self.call is None:
            return own
        call, counts = self.call, self.call.credits
        return (
            own,
            (call._phase.value, counts.granted, counts.arrived, counts.taken, counts.due_at, len(call._ready)),
            (call._is_aside, call._is_granting, call._watch is None, call._waiter is None or call._waiter.done()),
            type(call.error).__name__,
        )
