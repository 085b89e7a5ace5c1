"""Batches: items of one function that one thread runs, one after the other.

The thread takes items from the left and the worker's loop from the right, when they are recalled or not wanted any more. Taking is
atomic on both sides, so each item either begins here or goes back.
Results are sent together, but not kept for longer than a few milliseconds. This is the path of millions of tiny calls: what the
loop of `run` does for each of them counts.
"""

import marshal
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, cast

from percore._ipc.codec import is_inline_value
from percore._ipc.pickles import load
from percore._ipc.slots import INLINE_LIMIT
from percore._messages import ITEM_SHIFT, RESULT, VALUES, Body
from percore._points import POINTS, point
from percore._worker.answers import Answers, Function, Send
from percore._worker.terms import Terms

_KEEP: Final = 0.003
_KEEP_BYTES: Final = 32_768
_MANY: Final = 100
_LOOK_EVERY: Final = 8
"""Items of a batch of many between two looks at the clock, which costs as much as a tiny call."""

_MARSHAL: Final = 2
_SCALARS: Final = frozenset({int, float, bool, type(None)})


def item_id(call_id: int, index: int) -> int:
    """The id of an item of a batch."""
    return (index + 1) << ITEM_SHIFT | call_id


class Batch:
    """The items that are left, and how they are called."""

    __slots__ = ("begun_at", "end", "function", "is_bare", "items", "terms")

    def __init__(self, function: Function, bodies: list[Any], is_bare: bool, terms: Terms | None) -> None:
        self.function = function
        self.items = deque(bodies)
        self.is_bare = is_bare
        self.terms = terms
        self.end = len(bodies)
        self.begun_at: float | None = None

    def give_up(self, most: int) -> int:
        """Take up to `most` items out that have not begun, the last ones. From the loop alone."""
        count = 0
        while count < most:
            try:
                self.items.pop()
            except IndexError:  # the thread has taken the last one
                break
            count += 1
        self.end -= count
        return count

    def run(self, results: "Results", fn: Callable[..., Any], marks: memoryview, word: int) -> None:
        """Run what is left, in this thread. Before each item the number of those begun is marked in this word. Never raises."""
        step = _LOOK_EVERY if self.end > _MANY else 1
        start = 1
        while self._run_some(range(start, start + step), results, fn, marks, word):
            start += step
            results.look()
        results.flush()

    def _run_some(self, counts: range, results: "Results", fn: Callable[..., Any], marks: memoryview, word: int) -> bool:
        """Run as many items as there are counts. Whether there were so many."""
        take, is_bare, keep = self.items.popleft, self.is_bare, results.values.append
        for count in counts:
            try:
                body = take()
            except IndexError:  # that was all, or the loop has taken the rest
                return False
            marks[word] = count
            try:
                if POINTS:
                    point("worker.call.running")
                result = fn(body) if is_bare else fn(*body) if type(body) is tuple else _call_pickled(fn, body)
                if type(result) in _SCALARS:
                    keep(result)
                else:
                    results.add(count - 1, result)
                    keep = results.values.append
            except BaseException as error:
                results.fail(count - 1, error)
                keep = results.values.append
        return True


def _call_pickled(fn: Callable[..., Any], body: bytes) -> Any:
    args, kwargs = cast("tuple[tuple[Any, ...], dict[str, Any]]", load(body))
    return fn(*args, **kwargs)


class Results:
    """Results of a batch that wait to be sent together: of consecutive items."""

    __slots__ = ("_answers", "_call_id", "_first", "_hand_over", "_pickled", "_send", "_since", "_size", "values")

    def __init__(self, call_id: int, answers: Answers, send: Send, hand_over: Callable[[int, Any, float | None], None]) -> None:
        self._call_id = call_id
        self._answers = answers
        self._send = send
        self._hand_over = hand_over
        self._since = time.perf_counter()
        self._first = 0
        self._size = 0
        self.values: list[Any] = []
        """Scalars, and pickles where that is noted."""
        self._pickled: list[int] = []

    def add(self, index: int, value: object) -> None:
        """Of any kind. Runs user code."""
        if is_inline_value(value):
            self.values.append(value)
            self._size += len(value) if isinstance(value, str | bytes) else 0
        elif hasattr(type(value), "__await__"):  # a metaclass may have its say
            self.flush()
            self._first = index + 1
            self._hand_over(item_id(self._call_id, index), value, None)
        else:
            pickled = self._answers.result(item_id(self._call_id, index), value, self._flush_then_send, keep_small=True)
            if pickled is None:
                self.flush()
                self._first = index + 1
            else:
                self._pickled.append(len(self.values))
                self.values.append(pickled)
                self._size += len(pickled)
        if self._size > _KEEP_BYTES:
            self.flush()

    def fail(self, index: int, error: BaseException) -> None:
        """An item has raised this."""
        self.flush()
        self._first = index + 1
        self._answers.error(item_id(self._call_id, index), error, self._send)

    def look(self) -> None:
        """Send what has been kept for long."""
        if time.perf_counter() - self._since > _KEEP:
            self.flush()

    def flush(self) -> None:
        """Send what is kept."""
        now = time.perf_counter()
        values = self.values
        if values:
            if POINTS:
                point("worker.outcome.ready")
            message = marshal.dumps((self._first, now - self._since, values, self._pickled), _MARSHAL)
            if len(message) <= INLINE_LIMIT:
                self._send(VALUES, self._call_id, message)
            else:
                self._send_one_by_one()
            self._first += len(values)
            self.values, self._pickled, self._size = [], [], 0
        self._since = now

    def _send_one_by_one(self) -> None:
        """There are huge ints among them, whose size nobody has looked at."""
        for place, value in enumerate(self.values):
            call_id = item_id(self._call_id, self._first + place)
            if place in self._pickled:
                self._send(RESULT, call_id, value)
            else:
                self._answers.result(call_id, value, self._send)

    def _flush_then_send(self, op: int, call_id: int, body: Body) -> None:
        """Send these, and then a message."""
        self.flush()
        self._send(op, call_id, body)
