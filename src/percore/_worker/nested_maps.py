"""Maps that a call makes: a window of nested calls, over inputs that are iterated in the call's own worker.

A coroutine pulls sync inputs in the event loop, and async ones in a task beside it. A thread pulls its inputs itself, between the
results that it takes.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine, Generator
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

from percore._common.callables import check_awaited
from percore._common.endings import wake
from percore._common.errors import as_error, shown
from percore._common.inputs import Inputs, unpacked
from percore._protocol.messages import ANSWER_ERROR
from percore._protocol.nested_calls import NestedRequest
from percore._worker.families import Family, ItemChild
from percore._worker.walks import OVER, WAIT, Source, Walk, check_in_loop

if TYPE_CHECKING:
    from percore._common.tracing import Span

T_co = TypeVar("T_co", covariant=True)

WINDOW: Final = 256
"""Items that may be pulled and not returned, unless the map sets a window."""

_HEAVIEST: Final = 64 << 20
"""Bytes of pickled arguments and results of the items in the window, from which on no more items are pulled."""

_KEEP: Final = 0.002
"""Seconds that the call of an item may wait for those of the next items, which a thread pulls meanwhile."""

_PULL_SECONDS: Final = 0.003
"""How long pulling from sync inputs may keep the event loop busy before other tasks run."""


class MapSpec(NamedTuple):
    """The options of a map. All as in `percore._map.rows.Spec`.

    Attributes:
        request: pickles a call, given its arguments and its key.
    """

    ordered: bool
    window: int | None
    key: Callable[..., Any] | None
    return_exceptions: bool
    pairs: bool
    star: bool
    request: Callable[[tuple[Any, ...], Any], NestedRequest]


class _Item:
    """An item that was pulled and whose result was not returned."""

    __slots__ = ("_source", "child", "error", "is_done", "row", "size")

    def __init__(self, source: "MapSource", row: Any) -> None:
        self._source = source
        self.row = row
        self.child: ItemChild | None = None
        self.error: BaseException | None = None
        """The error that has kept it from being sent."""
        self.is_done = False
        self.size = 0
        """Bytes of its arguments."""

    def told(self, child: ItemChild) -> None:
        """Take the answer. In the loop, or in any thread if the call fails."""
        self.child = child
        self._source.answered(self)


class MapSource(Source):
    """The results of one map."""

    def __init__(self, family: Family, span: "Span | None", inputs: Inputs, spec: MapSpec) -> None:
        super().__init__(family, span)
        self.inputs = inputs
        self.spec = spec
        self.stops_early = False
        """Whether the first error of any item is raised, whatever comes before it."""
        self._window = WINDOW if spec.window is None else spec.window
        self._items: OrderedDict[_Item, None] = OrderedDict()
        """The items in the window, in the order of the inputs."""
        self._done: deque[_Item] = deque()
        """Unordered: the items to return."""
        self._failed: deque[_Item] = deque()
        """Items that have failed, if the map stops early."""
        self._is_async = self._is_exhausted = self._is_begun = self._is_watched = False
        self._error: BaseException | None = None
        """The error of an input, to raise after the results."""
        self._weights = [0, 0, 0]
        """Bytes sent, arrived and returned: each is counted by one thread alone."""
        self.feeder: asyncio.Task[None] | None = None
        self._room: asyncio.Future[None] | None = None

    # Pulling

    def begin(self, *, is_async: bool) -> None:
        self._is_begun, self._is_async = True, is_async
        if not is_async:
            self.inputs.prefer_sync()
        if self.inputs.is_async and not is_async:
            raise TypeError(
                "a plain function cannot pull an async iterable: make the map in a coroutine, or give it a sync iterable"
            )
        self.inputs.open()
        if self.inputs.is_async:
            self.family.enders[self._end_feeder] = None  # first: in a loop with eager tasks, the feeder may end before it is known
            self._start_feeder()

    def _start_feeder(self) -> None:
        self.feeder = self.loop.create_task(self._feed(), name="percore-map")
        self.feeder.add_done_callback(self._feeder_ended)

    def _feeder_ended(self, _feeder: "asyncio.Task[None]") -> None:
        """Start another feeder, which only closes the inputs, if this one was cancelled before its first step."""
        if self._end_feeder not in self.family.enders:
            return
        if not (self.is_closed or self.family.is_over):
            self._error = _cancelled_input(asyncio.CancelledError())
        self._is_exhausted = True
        self._start_feeder()

    async def _feed(self) -> None:
        """Pull async inputs."""
        try:
            while not (self._is_exhausted or self.is_closed):
                while not self._has_room():
                    self._room = self.loop.create_future()
                    await self._room
                pulled = await self.inputs.pull()
                if self.is_closed:
                    return
                for row in pulled.rows:
                    self._submit(row)
                self._error, self._is_exhausted = pulled.error, pulled.is_end
                self.wake()
        except asyncio.CancelledError as error:
            if self.is_closed or self.family.is_over:
                raise
            self._error = _cancelled_input(error)
        except BaseException as error:
            self._error = as_error(error, "percore")
        finally:
            self._is_exhausted = True
            self.family.enders.pop(self._end_feeder, None)
            self.wake()
            await self.inputs.close()

    def _has_room(self) -> bool:
        sent, arrived, returned = self._weights
        return len(self._items) < self._window and (not self._items or sent + arrived - returned < _HEAVIEST)

    def _pull(self, rows: int) -> bool:
        """Pull up to so many rows from sync inputs. Return whether any was pulled."""
        if self.inputs.is_async:
            return False
        count = 0
        while count < rows and not self._is_exhausted and self._has_room():
            pulled = self.inputs.pull_now(1)
            if self.is_closed:
                return False
            for row in pulled.rows:
                self._submit(row)
            self._error, self._is_exhausted = pulled.error, pulled.is_end
            count += 1
        return count > 0

    def _submit(self, row: Any) -> None:
        """Make the call of a row. Runs user code: it computes the key and pickles the arguments."""
        spec, item = self.spec, _Item(self, row)
        try:
            args = unpacked(row) if spec.star else (row,) if self.inputs.is_single else row
            key = None
            if spec.key is not None:
                key = spec.key(*args)
                check_awaited("key", key)
            request = spec.request(args, key)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # of this item
            item.error = as_error(error, "pickling")
            self._items[item] = None
            self.answered(item)
            return
        if self.is_closed:  # by the user's code
            return
        item.size = len(request.pickle or b"")
        self._weights[0] += item.size
        if not spec.pairs:
            item.row = None
        child = self.family.child(ItemChild, item.told)
        item.child = child
        channel = self.families.channel
        self.family.ask(request, child, channel.send if self._is_async else channel.keep)
        self._items[item] = None
        if not self._is_async and not self._is_watched:
            self._is_watched = True
            self.loop.call_soon_threadsafe(self._watch)

    def _watch(self) -> None:
        self.loop.call_later(_KEEP, self._flush_kept)

    def _flush_kept(self) -> None:
        """Send the calls of items that wait for more. Their thread may be waiting for its input, so the loop does this."""
        self._is_watched = False  # first: an item that is pulled from now on sets the timer again
        self.families.channel.flush()

    # Results

    def answered(self, item: _Item) -> None:
        """Note that an item is done."""
        child = item.child
        if child is not None and child.answer is not None:
            op, body = child.answer
            self._weights[1] += len(body) if type(body) is bytes else 0
            if op == ANSWER_ERROR and self.stops_early:
                self._failed.append(item)
        elif self.stops_early:
            self._failed.append(item)
        item.is_done = True
        if not self.spec.ordered:
            self._done.append(item)
        self.wake()

    def _next(self) -> _Item | None:
        """Return the next item to return, if it is done."""
        if self._failed:
            return self._failed.popleft()
        if not self.spec.ordered:
            return self._done.popleft() if self._done else None
        first = next(iter(self._items), None)
        return first if first is not None and first.is_done else None

    def take(self) -> Any:
        if self.is_closed:
            return OVER
        began = perf_counter()
        self._pull(2)  # more than one for each result that is returned, so that the window fills
        item = self._next()
        while item is None and self._pull(1):
            item = self._next()
            if self._is_async and perf_counter() - began > _PULL_SECONDS:
                self.loop.call_soon(self.wake)
                break
        if not self._is_async:
            self.families.channel.flush()
        if item is not None:
            return self._value(item)
        if not self._is_exhausted or self._items:
            return WAIT
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error
        return OVER

    def _value(self, item: _Item) -> Any:
        """Return the result of an item, or raise its error."""
        self._items.pop(item, None)
        child = item.child
        answer = None if child is None else child.answer
        self._weights[2] += item.size + (len(answer[1]) if answer is not None and type(answer[1]) is bytes else 0)
        wake(self._room)
        try:
            if item.error is not None:
                raise item.error
            assert child is not None
            result = self.families.unpack(child)
        except Exception as error:
            if not self.spec.return_exceptions or (child is not None and child.failure is not None):
                raise
            result = error
        return (item.row, result) if self.spec.pairs else result

    def abandon(self) -> None:
        items, self._items = self._items, OrderedDict()
        self._done.clear()
        for item in list(items):  # at once: a thread may be about to add one
            if item.child is not None:
                self.family.drop_soon(item.child)
        if self.feeder is not None:
            self.loop.call_soon_threadsafe(self._end_feeder)
        elif self._is_begun:
            self._is_exhausted = True
            self.inputs.close_now()

    def _end_feeder(self) -> None:
        """Stop pulling async inputs. A feeder that closes them already is left alone, since their clean-up may wait."""
        if self.feeder is not None and not self._is_exhausted:
            self.feeder.cancel()


def _cancelled_input(error: asyncio.CancelledError) -> RuntimeError:
    """Return the error of a map whose feeder was cancelled: by its input, or by code that cancels all tasks."""
    failure = RuntimeError(f"the input raised {shown(error)}")
    failure.__cause__ = error
    return failure


class NestedMap(Walk[T_co]):
    """The results of `percore.current_runner().map(...)`: a coroutine awaits it for a list or iterates it with `async for`, a plain
    function iterates it with `for`. Use it once, in one of these ways.

    It is lazy: it pulls nothing from the inputs before it is used. At most `window` items are pulled whose results have not been
    returned yet. To stop early, leave a `with` or `async with` block around the map, call `close()` or `aclose()`, or drop the last
    reference to it: each cancels the calls that are not done, and closes the generators among the inputs. The end of the call ends
    the map, too. A `break` alone does not end a map that a variable still refers to.
    """

    _noun = "map"

    def __await__(self) -> Generator[Any, None, list[T_co]]:
        return self.collect().__await__()

    def collect(self) -> Coroutine[Any, Any, list[T_co]]:
        """Return a coroutine that returns all results as a list. For a coroutine; a plain function writes `list(...)`.

        If cancelled, it cancels the calls that are not done.

        Raises:
            RuntimeError: the map was used before, or this is not the worker's event loop.
            Exception: the first error that any call raises, unless `return_exceptions` is set; or the error of an input.
        """
        self._is_asked = True  # also if a task of this coroutine is cancelled before it begins
        return self._collected()

    async def _collected(self) -> list[T_co]:
        source = cast(MapSource, self._source)
        check_in_loop(source.family, "await is", "write `list(...)` around the map")
        if self._is_begun or source.is_closed:
            raise RuntimeError("a map is used once; call runner.map(...) again for another round")
        source.stops_early = not source.spec.return_exceptions
        return [value async for value in self]

    async def aclose(self) -> None:
        """Cancel the calls that are not done, and close the generators among the inputs. In a coroutine. Idempotent."""
        source = cast(MapSource, self._source)
        source.close()
        while source.feeder is not None and not source.feeder.done():
            await asyncio.wait([source.feeder])

    def __len__(self) -> int:
        return len(cast(MapSource, self._source).inputs)

    def __bool__(self) -> bool:
        return True
