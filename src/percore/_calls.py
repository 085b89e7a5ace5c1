"""Calls and functions on the supervisor's side: what a user hands over, made ready to travel.

What `submit` gives is the call itself, a future; `run` awaits a plain one that belongs to its call. A call's arguments are pickled
once, when it is made, so later changes are not seen and another worker gets the same bytes.
"""

import asyncio
import inspect
from collections.abc import Callable, Hashable
from itertools import islice
from types import MethodType
from typing import Any, ClassVar, Final, Protocol, TypeGuard

from percore._core.flow import Cost
from percore._errors import RunnerClosed
from percore._ipc.advice import Nowhere, blamed, unsendable, unsendable_function
from percore._ipc.pickles import CANNOT, dump, is_by_reference, qualified_name
from percore._ipc.presses import Presses
from percore._ipc.slots import INLINE_LIMIT, SlotWriter
from percore._messages import Kind, Payload
from percore._options import routines_of
from percore._policy import Plan, Policy
from percore._shares import Share, Shares

_REMEMBERED: Final = 4096
"""Functions kept by number. When there are more, the oldest ones are forgotten, and get another number if they are called again."""

_CUT: Final = "the runner was closed before this call could end"


class Owner(Protocol):
    """Whoever wants to know that a call was cancelled."""

    def cancelled(self, call: Any) -> None: ...


class Call(asyncio.Future[Any]):
    """One call: the future its caller awaits, and what is needed to run it."""

    __slots__ = ("body", "call_id", "function", "key", "kind", "member", "owner", "plan")

    queue: ClassVar[None] = None
    """It is of no map."""
    size: ClassVar[int] = 1

    # Set by whoever makes the call, and the last one by whoever sends it: an initialiser would cost a third more.
    owner: Owner
    function: "Function"
    kind: int
    key: Hashable | None
    plan: Plan | None
    body: tuple[Any, ...] | Payload
    member: Any
    call_id: int

    def __repr__(self) -> str:
        """As that of a future, with the name of the function; so is what asyncio reports of an exception that nobody retrieved."""
        text = super().__repr__()
        function = getattr(self, "function", None)  # not there yet in the midst of its making
        return text if function is None else text.replace("<Call ", f"<Call of {function.name} ", 1)

    def cancel(self, msg: Any = None) -> bool:
        """Cancel the future and withdraw the call, or cancel it in its worker. Its result, should one come, is dropped."""
        if super().cancel(msg):
            self.owner.cancelled(self)
            return True
        return False

    def deliver(self, value: Any, size: int) -> None:
        """End with this result, whose pickle had `size` bytes."""
        self.set_result(value)

    def cut_off(self) -> None:
        """End by the closing of the runner. Unlike other failures nobody has to read this one: whoever closed knows."""
        self.set_exception(RunnerClosed(_CUT))
        self.exception()


class Awaited:
    """A call that `run` awaits and nobody else holds, under no policy (`Planned`: under one), and that leaves nothing to release.

    What is awaited is a plain future, since a task takes twice as long to wait for one of a subclass. Such a future does not tell
    when it is cancelled: `run` hears of that when its task goes on, and withdraws the call then.
    """

    __slots__ = ("body", "call_id", "function", "future", "is_over", "kind", "member")

    key: ClassVar[Hashable | None] = None
    plan: ClassVar[Plan | None] = None
    queue: ClassVar[None] = None
    size: ClassVar[int] = 1

    # As those of `Call`.
    future: asyncio.Future[Any]
    function: "Function"
    kind: int
    body: tuple[Any, ...] | Payload
    member: Any
    call_id: int
    is_over: bool
    """Whether it has ended, or was withdrawn."""

    def done(self) -> bool:
        """Whether it has ended, or was withdrawn."""
        return self.is_over

    def set_result(self, value: Any) -> None:
        """End with this result."""
        self.is_over = True
        if not self.future.done():
            self.future.set_result(value)

    def deliver(self, value: Any, size: int) -> None:
        """End with this result, whose pickle had `size` bytes."""
        self.set_result(value)

    def set_exception(self, error: BaseException) -> None:
        """End with this error."""
        self.is_over = True
        if not self.future.done():
            self.future.set_exception(error)

    def cut_off(self) -> None:
        """End by the closing of the runner."""
        self.set_exception(RunnerClosed(_CUT))


class Planned(Awaited):
    """The same under a policy. What its worker need not know of is planned when the first attempt has failed."""

    __slots__ = ("key", "plan", "policy")

    # Each has its own, where the others have none.
    key: Hashable | None  # type: ignore[misc]
    plan: Plan | None  # type: ignore[misc]
    policy: Policy


def is_dropped(call: object) -> TypeGuard[Awaited]:
    """Whether nobody awaits this call of `run` any more, of which it hears itself in a moment."""
    return isinstance(call, Awaited) and call.future.done()


class Function:
    """A function to call: how it travels and where its calls run. Number 0: it travels with each call."""

    __slots__ = ("cost", "fn", "kind", "number", "payload", "users")

    def __init__(self, fn: Callable[..., Any], kind: int) -> None:
        self.fn = fn
        self.kind = kind
        self.number = 0
        self.payload: Payload = b""
        self.users = 0
        self.cost = Cost()
        """What one of its calls takes, as maps have measured."""

    @property
    def name(self) -> str:
        return qualified_name(self.fn)


def kind_of(fn: object) -> int:
    """Where calls of `fn` run.

    Raises:
        TypeError: it is a coroutine (then it is closed), a generator function, or nothing that can be called.
    """
    if inspect.iscoroutine(fn):
        fn.close()
        name = getattr(fn, "__qualname__", "fetch")
        raise TypeError(f"give the function and its arguments: runner.run({name}, ...), not runner.run({name}(...))")
    if not callable(fn):
        raise TypeError(f"expected a function, not {fn!r}")
    inner, call = routines_of(fn)
    if inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(call):
        return Kind.TASK
    if any(
        is_generator(made) for is_generator in (inspect.isgeneratorfunction, inspect.isasyncgenfunction) for made in (inner, call)
    ):
        raise TypeError(
            f"{qualified_name(fn)} is a generator function: one call gives one result. "
            "Give a function that returns a list, or map a function over the inputs of the generator"
        )
    return Kind.THREAD


class Functions:
    """The functions of one runner, by number."""

    def __init__(self, slots: SlotWriter, shares: Shares, *, main_by_value: bool) -> None:
        self._slots = slots
        self._shares = shares
        # Half of the slots stays for calls at the moment they are sent: neither calls that wait nor functions that are held can
        # then keep all of them, and so a call ahead of them from being sent.
        self._main_by_value = main_by_value
        self._presses = Presses(slots, main_by_value=main_by_value, sparing=True)
        self.known: dict[int | tuple[int, int], Function] = {}
        """Functions that travel by reference, by their id; each is kept, so no other can have that id. Class methods, which are new
        objects each time, by the ids of function and class."""
        self._held: set[int] = set()
        """Numbers of functions that are held."""
        self.on_forgotten: Callable[[], None] = lambda: None
        """Called when known functions were forgotten."""
        self._last = 0

    def of(self, fn: Callable[..., Any]) -> Function:
        """The function, remembered where it travels by reference.

        Raises:
            TypeError: as `kind_of`.
        """
        is_class_method = type(fn) is MethodType and isinstance(fn.__self__, type)
        name = (id(fn.__func__), id(fn.__self__)) if is_class_method else id(fn)  # type: ignore[attr-defined]  # of methods
        function = self.known.get(name)
        if function is not None:
            return function
        function = Function(fn, kind_of(fn))
        if is_by_reference(fn):
            try:
                if not self._number(function):
                    return function
            except Exception:  # a class whose metaclass has a reducer that fails; it does so again for each call, and fails that
                return function
            if len(self.known) >= _REMEMBERED:
                self._forget_oldest()
            self.known[name] = function
        return function

    def _forget_oldest(self) -> None:
        """Forget a quarter of the known functions. Their calls that wait name them by their old numbers, and go on."""
        forgotten = [self.known.pop(name, None) for name in list(islice(self.known, -(-_REMEMBERED // 4)))]
        self.on_forgotten()
        del forgotten  # not before everything is in order: this may run a `__del__`

    def numbers(self) -> set[int]:
        """The numbers of functions that are known or held."""
        return {function.number for function in self.known.values()} | self._held

    def hold(self, fn: Callable[..., Any]) -> Function:
        """As `of`, but a function that travels by value is pickled once and numbered until `drop`.

        Raises:
            TypeError: as `kind_of`.
            Exception: whatever pickling it raised.
        """
        function = self.of(fn)
        if not function.number and self._number(function):
            function.users = 1
            self._held.add(function.number)
        return function

    def drop(self, function: Function) -> None:
        """No call will name this held function again."""
        self._held.discard(function.number)
        self._slots.discard(function.payload)
        function.payload = b""
        self._shares.drop(function)

    def discard(self, body: tuple[Any, ...] | Payload) -> None:
        """What a call was to carry is of no use: its slot, if it has one, is free."""
        if type(body) is int:
            self._slots.discard(body)

    def _number(self, function: Function) -> bool:
        """Pickle the function and give it a number. False: it has to travel with each call."""
        try:
            payload, met = self._pickled(function.fn)
        except CANNOT as error:
            told = unsendable_function(function.name, error)
            if told is error:
                raise
            raise told from error
        if type(payload) is bytes and len(payload) > INLINE_LIMIT:  # no slot was free for something this large
            return False
        function.payload = payload
        if met:
            self._shares.hold(function, met)
        self._last += 1
        function.number = self._last
        return True

    def pickle(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Payload, list[Share]]:
        """What a call of this function is to carry, and the shared objects it has to hold until it has ended.

        Raises:
            PayloadTooLarge: above max_message.
            PicklingError, AttributeError, TypeError: something cannot be pickled; the error tells which argument that is.
            BaseException: whatever the user's objects raise while they are pickled.
        """
        try:
            return self._pickled((args, kwargs) if function.number else (function.fn, args, kwargs))
        except CANNOT as error:
            told = self._told(function, args, kwargs, error)
            if told is error:
                raise
            raise told from error

    def _told(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Exception:
        """The error that names what could not be pickled."""
        fn = function.fn
        if not function.number and not self._can_pickle(fn):
            return unsendable_function(function.name, error)
        return unsendable(*blamed(fn, args, kwargs, self._can_pickle), error)

    def _can_pickle(self, obj: object) -> bool:
        nowhere = Nowhere()
        outer = self._shares.watch()
        try:
            dump(obj, nowhere, main_by_value=self._main_by_value, beside=nowhere)
        except Exception:
            return False
        finally:
            self._shares.seen(outer)
        return True

    def _pickled(self, obj: object) -> tuple[Payload, list[Share]]:
        shares = self._shares
        outer = shares.watch()
        try:
            payload = self._presses.take().payload(obj)
        finally:
            met = shares.seen(outer)
        return payload, [*met]
