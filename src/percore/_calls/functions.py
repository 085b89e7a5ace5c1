"""The functions of a runner: each is pickled once, if it can be, and sent to a worker before its first call there.

The arguments of a call are pickled here too, since an error names the function and the argument.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from time import monotonic_ns
from types import MethodType
from typing import Any, Final, Protocol

from percore._calls.meters import UNMETERED, Meter, Meters
from percore._calls.shared_objects import Share, Shares
from percore._common.callables import is_async_stream, is_coroutine_call, qualified_name
from percore._protocol.interfaces import Store
from percore._protocol.messages import UNDEFINE, Body, Kind, Payload
from percore._scheduler.windows import Cost
from percore._serialization.advice import blamed, unsendable, unsendable_function
from percore._serialization.pickler import CANNOT, is_by_reference

_REMEMBERED: Final = 4096
"""Functions remembered by number. Above this many, the oldest are forgotten; they get a new number when they are called again."""

_STREAM: Final = -1
"""Beside the id of a generator function. It is the id of no object."""

_LOOKS: Final = 4
"""Number of retired functions with running calls to check after each outcome, so that the cost stays constant."""


class Function:
    """A function to call: how it is sent, and where its calls run. Number 0: it is sent with each call."""

    __slots__ = ("cost", "fn", "kind", "meter", "number", "payload", "users")

    def __init__(self, fn: Callable[..., Any], kind: int, meter: Meter = UNMETERED) -> None:
        self.fn = fn
        self.kind = kind
        self.meter = meter
        self.number = 0
        self.payload: Payload = b""
        self.users = 0
        self.cost = Cost()
        """How long one of its calls takes, as measured by maps."""

    @property
    def name(self) -> str:
        return qualified_name(self.fn)


class Use(Protocol):
    """A call, as its function sees it."""

    function: Function
    member: Any


class Caller(Protocol):
    """A worker, as functions see it."""

    defined: set[int]
    """Numbers of the functions that it was sent."""

    tell: Callable[[int, int, Body], None]

    @property
    def calls(self) -> Mapping[int, Use]: ...


class Functions:
    """The functions of one runner, by number."""

    def __init__(self, store: Store, shares: Shares, workers: Collection[Caller], meters: Meters) -> None:
        """`workers`: all workers that have not ended."""
        self.store = store
        self._meters = meters
        self._workers = workers
        self._shares = shares
        self._pickler = store.pickler
        self.known: dict[int | tuple[int, ...], Function] = {}
        """Functions that are pickled by reference, by id. Each entry refers to its function, so no other object can get that id.

        A class method is a new object at each access, so it is found by the ids of its function and its class. Generator functions
        have a mark beside the id: other verbs than `stream` must not find them."""
        self._held: set[int] = set()
        """Numbers of the functions that `hold` has numbered and that are not released."""
        self._placed = 0
        """How many functions have parcels."""
        self.retired: deque[tuple[Function, list[Use]]] = deque()
        """Held functions that no new call will use, each with its calls that were under way when it was retired."""
        self._last = 0
        self._changes: tuple[Callable[[Callable[..., Any]], Callable[..., Any]], ...] = ()

    def change(self, *changes: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """From now on call what these return, one after the other, in place of each function but those of streams.

        For tests of programs: `percore.testing`.
        """
        self._changes = changes
        forgotten = dict(self.known)
        self.known.clear()  # a known function does not come to `of`
        self._undefine_forgotten()
        del forgotten  # as in `_forget_oldest`

    def of(self, fn: Callable[..., Any], *, is_stream: bool = False) -> Function:
        """Return the `Function` of `fn`. It is remembered if `fn` is pickled by reference.

        Raises:
            TypeError: as `is_coroutine_call`, or, for a stream, as `is_async_stream`.
        """
        for change in () if is_stream else self._changes:
            fn = change(fn)
        is_class_method = type(fn) is MethodType and isinstance(fn.__self__, type)
        ids = (id(fn.__func__), id(fn.__self__)) if is_class_method else (id(fn),)  # type: ignore[attr-defined]  # of methods
        name = (*ids, _STREAM) if is_stream else ids if is_class_method else id(fn)
        function = self.known.get(name)
        if function is not None:
            return function
        is_task = is_async_stream(fn) if is_stream else is_coroutine_call(fn)
        function = Function(fn, Kind.TASK if is_task else Kind.THREAD, self._meters.of(fn))
        if is_by_reference(fn):
            try:
                if not self._number(function):
                    return function
            except Exception:  # the reducer of a metaclass has failed; it fails again for each call, which then gets the error
                return function
            if len(self.known) >= _REMEMBERED:
                self._forget_oldest()
            self.known[name] = function
        return function

    def _forget_oldest(self) -> None:
        """Forget the oldest quarter of the known functions. Their waiting calls keep the old numbers and remain valid."""
        forgotten = [self.known.pop(name, None) for name in list(islice(self.known, -(-_REMEMBERED // 4)))]
        self._undefine_forgotten()
        del forgotten  # last, when the state is consistent: this may run a `__del__`

    def _undefine_forgotten(self) -> None:
        """Let workers forget the functions that are neither known nor held.

        A worker keeps those whose calls it has; the next run of this method looks at them again. Before a worker is sent another
        call of a forgotten function, it is sent the function again.
        """
        in_use = {function.number for function in list(self.known.values())} | self._held
        for worker in list(self._workers):
            called = {call.function.number for call in list(worker.calls.values())}
            for number in worker.defined - in_use - called:
                worker.defined.discard(number)
                worker.tell(UNDEFINE, number, None)

    def hold(self, fn: Callable[..., Any]) -> Function:
        """As `of`, but pickle a function that travels by value once, and give it a number until it is retired.

        Raises:
            TypeError: as `is_coroutine_call`.
            Exception: any error of pickling the function.
        """
        function = self.of(fn)
        if not function.number and self._number(function):
            function.users = 1
            self._held.add(function.number)
        return function

    def retire(self, function: Function, calls: Iterable[Use]) -> None:
        """Retire a held function, and forget it once all of these calls that are in workers have ended. It has no other calls."""
        if function.users:
            function.users = 0
            self.retired.append((function, [call for call in calls if call.member is not None]))
            self.forget_retired()

    def forget_retired(self) -> None:
        """Forget the retired functions that no worker needs any more.

        A worker may need a function as long as it has one of its calls, since even a call that has begun may still have to unpickle
        the function. This runs for each outcome, so it checks only the last call of a function, and at most `_LOOKS` functions with
        running calls. Once all calls have ended, all functions are forgotten, in whatever order the calls ended.
        """
        kept = 0
        for _ in range(len(self.retired)):
            if not self.retired or kept == _LOOKS:  # forgetting a function may run a `__del__` that ends a map
                return
            function, calls = self.retired.popleft()
            while calls and calls[-1].member is None:
                calls.pop()
            if calls:
                self.retired.append((function, calls))
                kept += 1
            else:
                self._drop(function)

    def _drop(self, function: Function) -> None:
        """Release a held function, here and in the workers. No call may name it from now on."""
        for worker in list(self._workers):
            if function.number in worker.defined:
                worker.defined.discard(function.number)
                worker.tell(UNDEFINE, function.number, None)
        self._held.discard(function.number)
        self._placed -= type(function.payload) is int
        self.discard(function.payload)
        function.payload = b""
        self._shares.drop(function)

    def discard(self, body: tuple[Any, ...] | Payload, met: Sequence[Share] = ()) -> None:
        """Release the body of a call that will not be sent, with the shared objects met in it; or the pickle of a function."""
        if type(body) is int:
            self.store.discard(body)
        self._shares.let_go(met)

    def size_of(self, body: object) -> int:
        """Return the size in bytes of a call's pickled arguments; 0 if they are sent without pickling."""
        if type(body) is bytes:
            return len(body)
        return self.store.size(body) if type(body) is int else 0

    def _number(self, function: Function) -> bool:
        """Pickle the function and give it a number. Return False if it must be sent with each call instead."""
        try:
            payload, met = self._shares.met_in(self._pickler().payload, function.fn)
        except CANNOT as error:
            told = unsendable_function(f"the function {function.name}", error)
            if told is error:
                raise
            raise told from error
        if type(payload) is int:
            if self._placed >= self.store.most_functions or not self.store.is_placed(payload):
                self.store.discard(payload)
                self._shares.let_go(met)
                return False
            self._placed += 1
        function.payload = payload
        if met:
            self._shares.hold(function, met)
        self._last += 1
        function.number = self._last
        return True

    def pickle(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Payload, Sequence[Share]]:
        """Pickle the arguments of a call. Return the payload, and the shared objects that the call must hold until it has ended.

        Raises:
            PayloadTooLarge: the pickle is larger than max_message.
            PicklingError, AttributeError, TypeError: an object cannot be pickled; the error names the argument.
            BaseException: any error that the user's objects raise while they are pickled.
        """
        dumps = function.meter.dumps
        dumps.left -= 1
        began = monotonic_ns() if dumps.left < 0 else 0
        try:
            payload, met = self._shares.met_in(
                self._pickler().payload, (args, kwargs) if function.number else (function.fn, args, kwargs)
            )
        except CANNOT as error:
            told = self._told(function, args, kwargs, error)
            if told is error:
                raise
            raise told from error
        if began:
            function.meter.dumped(monotonic_ns() - began, self.size_of(payload))
        return payload, met

    def _told(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Exception:
        """Return an error that names the argument, or the function, that could not be pickled."""
        fn = function.fn
        if not function.number and not self._can_pickle(fn):
            return unsendable_function(f"the function {function.name}", error)
        return unsendable(*blamed(fn, args, kwargs, self._can_pickle), error)

    def _can_pickle(self, obj: object) -> bool:
        can_pickle, met = self._shares.met_in(self.store.can_pickle, obj)
        self._shares.let_go(met)
        return can_pickle
