"""Nested calls: calls that a call makes from inside its worker. Their outcomes go back to that worker as the bytes that arrive."""

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Protocol

from percore._calls.calls import CallBase, Owner
from percore._calls.functions import Function
from percore._calls.policy import CallPlan
from percore._scheduler.queues import Queue

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


class ForeignFunction(Function):
    """A function of which only a worker knows more than the name. It travels in the pickle of each call."""

    __slots__ = ("_name", "module")

    def __init__(self, name: str, module: str, kind: int) -> None:
        super().__init__(_nowhere, kind)
        self._name = name
        self.module = module

    @property
    def name(self) -> str:
        return self._name


def _nowhere() -> None:
    raise NotImplementedError


class NestedCall(CallBase):
    """A call that another call has made from inside its worker."""

    __slots__ = ("_is_over", "asker", "body", "call_id", "function", "key", "kind", "member", "number", "owner", "plan", "queue")

    forwards = True
    is_short = False
    call_id: int

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

    def set_result(self, value: Any) -> None:
        """End with this result, a scalar."""
        self._is_over = True
        self.asker.returned(self, value)

    def deliver(self, value: Any, size: int) -> None:
        self.set_result(value)

    def forward(self, data: memoryview | bytes, *, is_error: bool) -> None:
        self._is_over = True
        self.asker.sent(self, data, is_error=is_error)

    def set_exception(self, error: BaseException) -> None:
        """End with this error."""
        self._is_over = True
        self.asker.failed(self, error)
