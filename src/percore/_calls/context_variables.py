"""What is sent with calls of the context in which they are made: the values of context variables, and the carrier of tracing."""

import sys
from collections.abc import Sequence
from contextvars import ContextVar, copy_context
from typing import Any, Final

from percore._common.errors import PayloadTooLarge
from percore._common.tracing import Span, Tracing
from percore._protocol.interfaces import Store
from percore._serialization.advice import unsendable
from percore._serialization.pickler import CANNOT, main_info

_UNSET: Final = object()
_LIMIT: Final = 100_000
"""Largest pickle of the values in bytes. They travel with every call, and no store keeps them for it."""
_TOO_LARGE: Final = (
    f"the values of the context variables take more than {_LIMIT} bytes when they are pickled, and they travel with every "
    "call: pass what is large as an argument, or give `contextvars=` fewer variables"
)


def references(variables: Sequence[ContextVar[Any]]) -> tuple[tuple[str, str], ...]:
    """Return the module and the name of each variable.

    Raises:
        ValueError: a variable is not an attribute of any module that a worker can import.
    """
    return tuple(_reference(variable) for variable in variables)


def _reference(variable: ContextVar[Any]) -> tuple[str, str]:
    for module_name, module in list(sys.modules.items()):
        if module_name in ("__main__", "__mp_main__") and main_info().by_value:
            continue
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is variable:
                return ("__main__" if module_name == "__mp_main__" else module_name), name
    raise ValueError(
        f"no module that a worker can import has {variable!r}: make it at the top level of a module, "
        "such as `user = ContextVar('user')`, and pass that one"
    )


class Contexts:
    """The context variables of a runner, and how to read their values."""

    def __init__(self, variables: Sequence[ContextVar[Any]], store: Store, tracing: Tracing | None = None) -> None:
        self._variables = variables
        self._store = store
        self.tracing = tracing

    def capture(self, span: Span | None = None) -> dict[int | str, Any] | bytes | None:
        """Return the current values by the number of their variable, pickled unless all are scalars; None if there are none.

        The carrier of tracing is among them: that of `span`, or else of the current context.

        Raises:
            PayloadTooLarge: the values take more than 100,000 bytes, which is too much to send with every call.
            BaseException: any error of pickling the values.
        """
        context = copy_context()
        values: dict[int | str, Any] = {}
        for number, variable in enumerate(self._variables):
            value = context.get(variable, _UNSET)
            if value is not _UNSET:
                values[number] = value
        if self.tracing is not None:
            values.update(self.tracing.carrier() if span is None else span.carrier)
        if not values:
            return None
        if self._store.passes(tuple(values.values())):
            return values
        try:
            pickled = self._store.pickled(values)
        except CANNOT as error:
            numbers = [number for number in values if isinstance(number, int)]
            number = next((number for number in numbers if not self._store.can_pickle(values[number])), numbers[0])
            failure: Exception = unsendable(f"the context variable {self._variables[number].name!r}", values[number], error)
        else:
            if len(pickled) <= _LIMIT:
                return pickled
            failure = PayloadTooLarge(_LIMIT, _TOO_LARGE)
        raise failure
