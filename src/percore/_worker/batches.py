"""Batches: items of one function that one thread runs one after the other.

The thread takes items from the left. The worker's loop takes items from the right when they are recalled or no longer wanted. Both
operations are atomic, so each item either begins here or goes back.

Results are sent together, but kept for a few milliseconds at most. Millions of tiny calls may take this path, so every operation in
the inner loop of `run` counts.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import repeat, starmap
from operator import length_hint
from typing import Any, Final, cast

from percore._common.fault_points import POINTS, point
from percore._protocol.messages import ITEM_SHIFT, RESULT, VALUES, Body, StartMarks
from percore._serialization.advice import IMPORT_ERRORS, advise_importing
from percore._serialization.pickler import load
from percore._worker.answers import Answers, Send, WorkerFunction
from percore._worker.terms import Terms

KEEP: Final = 0.003
"""Seconds that a result may wait for other results."""

_KEEP_BYTES: Final = 32_768
_STEPS: Final = 32
_LONGEST_STEP: Final = 32
"""A batch is sized to take a millisecond, and runs in `_STEPS` steps of up to `_LONGEST_STEP` items. Only between steps does the
thread check the clock and write the start mark, since each costs as much as a tiny call."""

_SCALARS: Final = frozenset({int, float, bool, type(None)})


def item_id(call_id: int, index: int) -> int:
    """Return the id of an item of a batch."""
    return (index + 1) << ITEM_SHIFT | call_id


class WorkerBatch:
    """The remaining items of a batch, their function and their terms."""

    __slots__ = ("begun", "begun_at", "end", "function", "is_bare", "items", "results", "terms")

    def __init__(self, function: WorkerFunction, bodies: list[Any], is_bare: bool, terms: Terms | None) -> None:
        self.function = function
        self.items = deque(bodies)
        self.is_bare = is_bare
        self.terms = terms
        self.end = len(bodies)
        self.begun = 0
        """How many items the thread has taken, in whole steps."""
        self.begun_at: float | None = None
        self.results: BatchResults | None = None
        """Its results while it runs, else None."""

    def give_up(self, most: int) -> int:
        """Remove up to `most` items that have not begun, from the end. Return how many. Only from the loop."""
        count = 0
        while count < most:
            try:
                self.items.pop()
            except IndexError:  # the thread has taken the last one
                break
            count += 1
        self.end -= count
        return count

    def run(self, results: "BatchResults", fn: Callable[..., Any], marks: StartMarks, word: int) -> None:
        """Run the remaining items in this thread. Never raises.

        Before each step, set `marks[word]` to the number of items begun, including all items of the step.
        """
        self.results = results
        call = fn if self.is_bare and not POINTS else partial(_call, fn, self.is_bare, self.function)
        step = min(_LONGEST_STEP, max(1, self.end // _STEPS))
        while self.items:
            marks[word] = begun = self.begun + step
            if not self._run_some(begun, results, call):
                break
            results.look()
        results.flush()

    def _run_some(self, begun: int, results: "BatchResults", call: Callable[[Any], Any]) -> bool:
        """Run the items up to number `begun`. Return False if there were fewer."""
        keep = results.values.append
        left = repeat((), begun - self.begun)
        try:
            for body in starmap(self.items.popleft, left):
                try:
                    result = call(body)
                    if (kind := type(result)) is int or kind in _SCALARS:
                        keep(result)
                    else:
                        results.add(begun - 1 - length_hint(left), result)
                except BaseException as error:
                    results.fail(begun - 1 - length_hint(left), error)
        except IndexError:  # from popleft: no items are left, or the loop has taken the rest
            return False
        self.begun = begun
        return True


def _call(fn: Callable[..., Any], is_bare: bool, function: WorkerFunction, body: Any) -> Any:
    if POINTS:
        point("worker.call.running")
    if is_bare:
        return fn(body)
    if type(body) is tuple:
        return fn(*body)
    loads = function.gauges.loads
    loads.left -= 1
    began = time.monotonic_ns() if loads.left < 0 else 0
    try:
        args, kwargs = cast("tuple[tuple[Any, ...], dict[str, Any]]", load(body))
    except IMPORT_ERRORS as error:
        advise_importing(error)
        raise
    if began:
        loads.took(time.monotonic_ns() - began)
    return fn(*args, **kwargs)


class BatchResults:
    """Results of consecutive items of a batch, kept to be sent together. The thread calls the methods, except `flush_kept`."""

    __slots__ = (
        *("_answers", "_call_id", "_first", "_function", "_hand_over", "_lock", "_pickled", "_send", "_since", "_size"),
        "values",
    )

    def __init__(
        self,
        call_id: int,
        function: WorkerFunction,
        answers: Answers,
        send: Send,
        hand_over: Callable[[int, Any, float | None], None],
    ) -> None:
        self._call_id = call_id
        self._function = function
        self._answers = answers
        self._send = send
        self._hand_over = hand_over
        self._since = time.perf_counter()
        self._first = 0
        self._size = 0
        self._lock = threading.Lock()
        """Held while results are sent, so that they arrive in order. Meanwhile the thread may append to the lists, never remove."""
        self.values: list[Any] = []
        """Scalars, and pickles (see `_pickled`)."""
        self._pickled: list[int] = []
        """Indexes of the items whose results are pickles."""

    def add(self, index: int, value: object) -> None:
        """Add a result of any type. Runs user code."""
        if self._answers.passes(value):
            self.values.append(value)
            self._size += len(value) if isinstance(value, str | bytes) else 0
        elif hasattr(type(value), "__await__"):  # may run code of a metaclass
            self.flush()
            self._first = index + 1
            self._hand_over(item_id(self._call_id, index), value, None)
        else:
            item, gauges = item_id(self._call_id, index), self._function.gauges
            pickled = self._answers.result(item, value, self._flush_then_send, gauges, keep_small=True)
            if pickled is None:
                self.flush()
                self._first = index + 1
            else:
                self._pickled.append(index)
                self.values.append(pickled)
                self._size += len(pickled)
        if self._size > _KEEP_BYTES:
            self.flush()

    def fail(self, index: int, error: BaseException) -> None:
        """Send the exception that an item has raised."""
        self.flush()
        self._first = index + 1
        self._answers.error(item_id(self._call_id, index), error, self._send)

    def look(self) -> None:
        """Send the kept results if `KEEP` is over."""
        if time.perf_counter() - self._since > KEEP:
            self.flush()

    def flush(self) -> None:
        """Send the kept results."""
        now = time.perf_counter()
        with self._lock:
            self._send_all(now - self._since)
        self._since = now

    def flush_kept(self) -> None:
        """Send the kept results if `KEEP` is over, while the thread runs a slow item. From the loop."""
        if self.values and time.perf_counter() - self._since > KEEP and self._lock.acquire(blocking=False):
            try:
                self._send_all(-1.0)  # how long these items took is not known
            finally:
                self._lock.release()

    def _send_all(self, seconds: float) -> None:
        values, first = self.values[:], self._first
        if not values:
            return
        if POINTS:
            point("worker.outcome.ready")
        end = first + len(values)
        pickled = [index - first for index in self._pickled if index < end]
        body = self._answers.pack_values(first, seconds, values, pickled)  # first: without memory for it no result may be lost
        if body is None:
            self._send_one_by_one(first, values, pickled)
            return
        # Remove them before they are sent: `_first` is then right for results that the thread appends from now on.
        self._first, self._size = end, 0
        del self.values[: len(values)], self._pickled[: len(pickled)]
        self._send(VALUES, self._call_id, body)

    def _send_one_by_one(self, first: int, values: list[Any], pickled: list[int]) -> None:
        """Send each result in its own message: huge ints, whose size is not counted, have made the message too large.

        If that raises, such as MemoryError, the result at hand and those after it are kept.
        """
        for place, value in enumerate(values):
            call_id = item_id(self._call_id, first + place)
            if place in pickled:
                self._send(RESULT, call_id, value)
                del self._pickled[0]
            else:
                self._answers.result(call_id, value, self._send)
            self._first += 1
            del self.values[0]
        self._size = 0

    def _flush_then_send(self, op: int, call_id: int, body: Body) -> None:
        """Send the kept results, then a message."""
        self.flush()
        self._send(op, call_id, body)
