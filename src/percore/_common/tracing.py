"""Tracing: what percore asks of a tracing library, in the program and in its workers. `percore.opentelemetry` implements it.

    program   Tracing.begin ─▶ Span ── carrier ──▶ values of a call's terms
    worker    values ─▶ Tracing.enter ─▶ Tracing.around the function

Without a tracing library no call reaches any of this: a carrier travels where the values of context variables do.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

Carrier = dict[str, str]
"""The context of a caller, as the headers of a request would carry it."""


class Span(Protocol):
    """What is traced of a call, or of a map, in the process that makes it."""

    carrier: Carrier
    """The context for the call."""

    def ended(self, error: BaseException | None, attempts: int = 1) -> None:
        """Note that it has ended: with a result, with an error, or cancelled (a CancelledError). Only the first time counts.

        It raises no Exception: a call ends its span in the middle of its own end.
        """


class Tracing(Protocol):
    """A tracing library. Workers get a pickled copy."""

    def carrier(self) -> Carrier:
        """Return the current context."""

    def begin(self, fn: Callable[..., Any], key: object = None) -> Span:
        """Begin the span of a call or a map of `fn`, below the current one."""

    def enter(self, carrier: Carrier) -> None:
        """In a worker: make the caller's context the current one."""

    def around(self, fn: Callable[..., Any], items: int = 1) -> AbstractContextManager[Callable[[BaseException], None]]:
        """In a worker: trace what runs inside, a call of `fn` or a batch of `items` calls, if it came with a caller's context.

        The context manager yields a function that notes the error of an item; an error that leaves the block it notes itself.
        """


class Installed:
    """The tracing library of this process."""

    tracing: Tracing | None = None
    """Runners and executors that are made from now on use it."""
