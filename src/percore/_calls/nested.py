"""Nested calls and streams, which a call makes from inside its worker. Their outcomes go back to that worker as the bytes that
arrive.
"""

from collections import deque
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Protocol

from percore._calls.calls import CallBase, Owner
from percore._calls.functions import Function
from percore._calls.meters import Meter
from percore._calls.policy import CallPlan
from percore._common.errors import CUT_OFF, RunnerClosed
from percore._common.worker_errors import WorkerDied
from percore._protocol.messages import BrokenFrame
from percore._scheduler.queues import Queue
from percore._scheduler.streaming import Credits

if TYPE_CHECKING:
    from percore._protocol.messages import Payload


class Asker(Protocol):
    """The receiver of the outcome of a nested call. Its methods run no user code, except that `failed` pickles the exception."""

    def returned(self, call: "NestedCall", value: object) -> None:
        """Take a scalar result."""

    def sent(self, call: "NestedCall", data: memoryview | bytes, *, is_error: bool) -> None:
        """Take a pickled result or exception."""

    def failed(self, call: "NestedCall", error: BaseException) -> None:
        """Take an exception of this process."""

    def items(self, call: "NestedStream", values: list[Any], pickled: list[int]) -> None:
        """Take the next items of a stream. `pickled`: the indexes of those that are pickles."""

    def item(self, call: "NestedStream", data: memoryview | bytes) -> None:
        """Take the pickle of the next item of a stream."""


class ForeignFunction(Function):
    """A function of which only a worker knows more than the name. It travels in the pickle of each call."""

    __slots__ = ("_name", "module")

    def __init__(self, name: str, module: str, kind: int, meter: Meter) -> None:
        super().__init__(_nowhere, kind, meter)
        self._name = name
        self.module = module

    @property
    def name(self) -> str:
        return self._name


def _nowhere() -> None:
    raise NotImplementedError


class NestedCall(CallBase):
    """A call that another call has made from inside its worker."""

    __slots__ = (
        *(
            "__weakref__",
            "_is_over",
            "accepted",
            "asker",
            "body",
            "call_id",
            "function",
            "key",
            "kind",
            "member",
            "number",
            "owner",
            "plan",
        ),
        "queue",
    )

    forwards = True
    is_short = False
    call_id: int
    accepted: int

    def __init__(  # noqa: PLR0913, PLR0917  # its fields
        self,
        asker: Asker,
        owner: Owner,
        number: int,
        function: Function,
        queue: Queue[Any, Any],
        key: Hashable | None,
        plan: CallPlan | None,
    ) -> None:
        self.asker = asker
        self.owner = owner
        self.number = number
        """Its number in the worker of the call that has made it."""
        self.function = function
        self.kind = function.kind
        self.queue = queue
        self.key = key
        self.plan = plan
        self.body: Payload | tuple[()] = ()
        self.member: Any = None
        self._is_over = False

    def done(self) -> bool:
        """Whether it has ended or was cancelled."""
        return self._is_over

    def cancel(self) -> None:
        """Cancel it. Its caller gets no answer."""
        if not self._is_over:
            self._is_over = True
            self.owner.cancelled(self)

    # It is over once its caller has the answer. If there is no memory for that, the call ends with the error of this.

    def set_result(self, value: Any) -> None:
        """End with this result, a scalar."""
        self.asker.returned(self, value)
        self._is_over = True

    def deliver(self, value: Any, size: int) -> None:
        self.set_result(value)

    def forward(self, data: memoryview | bytes, *, is_error: bool) -> None:
        self.asker.sent(self, data, is_error=is_error)
        self._is_over = True

    def set_exception(self, error: BaseException) -> None:
        """End with this error."""
        self.asker.failed(self, error)
        self._is_over = True


class NestedStream(NestedCall):
    """A stream that a call consumes. Its items pass through as they arrive.

    Credits go from end to end: the generator produces an item only if its consumer, in the other worker, has taken the item
    `prefetch` places before. A generator that has sent all it may waits for its consumer and gives its place back meanwhile, since
    the consumer may be waiting for a call that needs the place.
    """

    __slots__ = ("credits", "is_aside", "is_closing", "outbox")

    def __init__(  # noqa: PLR0913, PLR0917  # its fields
        self,
        asker: Asker,
        owner: Owner,
        number: int,
        function: Function,
        queue: Queue[Any, Any],
        key: Hashable | None,
        plan: CallPlan,
    ) -> None:
        super().__init__(asker, owner, number, function, queue, key, plan)
        self.credits = Credits(plan.policy.prefetch)
        self.is_aside = False
        """Whether it has given its place back, because it waits for credits."""
        self.is_closing = False
        """Whether the consumer has asked for the end, and waits for it."""
        self.outbox: deque[tuple[int, Any]] = deque()
        """Messages to the consumer that must not overtake the last one, in order."""

    def arrived(self, values: list[Any], pickled: list[int]) -> None:
        """Take the next items.

        Raises:
            BrokenFrame: the worker has sent more than it was granted.
        """
        self._count(len(values))
        if not self._is_over:
            self.asker.items(self, values, pickled)

    def item(self, data: memoryview | bytes) -> None:
        """As `arrived`, for one pickle."""
        self._count(1)
        if not self._is_over:
            self.asker.item(self, data)

    def _count(self, items: int) -> None:
        self.credits.arrive(items)
        if self.credits.is_used_up and not self.is_aside and self.member is not None:
            self.is_aside = self.member.step_aside(self)

    def taken(self, items: int) -> int:
        """Note that the consumer has taken items, and take the place again. Return how many more the worker may produce.

        Raises:
            BrokenFrame: it has taken more than it was sent.
        """
        self.credits.taken += items
        if items < 1 or self.credits.taken > self.credits.arrived:
            raise BrokenFrame(f"{items} items of a stream were taken, of which not all had arrived")
        if self.is_aside:
            self.is_aside = False
            self.member.come_back(self)
        return self.credits.grant()

    def ended(self) -> None:
        """Note that the generator has returned, or was closed."""
        if not self._is_over:
            self._is_over = True
            self.asker.returned(self, None)

    def set_result(self, value: Any) -> None:
        """Refuse a result.

        Raises:
            BrokenFrame: always, since no healthy worker sends one.
        """
        raise BrokenFrame(f"a result of {self.function.name}, which is a stream")

    def forward(self, data: memoryview | bytes, *, is_error: bool) -> None:
        if not is_error:
            self.set_result(data)
        super().forward(data, is_error=is_error)

    def set_exception(self, error: BaseException) -> None:
        """End with this error, after the items that have arrived. The death of a generator that is being closed is its end."""
        if self.is_closing and isinstance(error, WorkerDied):
            self.ended()
        else:
            super().set_exception(error)

    def cut_off(self) -> None:
        """The generator was closed: by its consumer, or because the runner is closing."""
        if self.is_closing:
            self.ended()
        else:
            self.set_exception(RunnerClosed(CUT_OFF))

    def abandon(self, error: BaseException) -> None:
        """End with this error, and have the worker close the generator."""
        self.set_exception(error)
        self.owner.cancelled(self)

    def left(self) -> None:
        """Note that no worker holds it any more."""
        self.is_aside = False
        if self.is_closing:  # it was handed back, and must not begin elsewhere
            self.ended()
