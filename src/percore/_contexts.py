"""Context variables that travel with calls: which they are, and their values at the moment of a call."""

import sys
from collections.abc import Sequence
from contextvars import ContextVar, copy_context
from typing import Any, Final

from percore._errors import PayloadTooLarge
from percore._ipc.codec import weight_of
from percore._ipc.pickles import dump, main_info
from percore._ipc.slots import INLINE_LIMIT, Sink, SlotWriter

_UNSET: Final = object()
_TOO_LARGE: Final = (
    f"the values of the context variables take more than {INLINE_LIMIT} bytes when they are pickled, and they travel with every "
    "call: pass what is large as an argument, or give `contextvars=` fewer variables"
)


def references(variables: Sequence[ContextVar[Any]]) -> tuple[tuple[str, str], ...]:
    """Module and name of each.

    Raises:
        ValueError: one is no attribute of a module that a worker can import.
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
    """Reads the values of the variables."""

    def __init__(self, variables: Sequence[ContextVar[Any]], slots: SlotWriter, *, main_by_value: bool) -> None:
        self._variables = variables
        self._slots = slots
        self._main_by_value = main_by_value

    def capture(self) -> dict[int, Any] | bytes | None:
        """The values of now, by the number of their variable: None where none is set; pickled unless all are scalars.

        Raises:
            PayloadTooLarge: they take more than 100,000 bytes, which is too much to go with every call.
            BaseException: whatever pickling them raises.
        """
        context = copy_context()
        values = {}
        for number, variable in enumerate(self._variables):
            value = context.get(variable, _UNSET)
            if value is not _UNSET:
                values[number] = value
        if not values:
            return None
        weight = weight_of(values.values())
        if weight is not None and weight <= INLINE_LIMIT:  # keys and brackets weigh little: a frame has room for twice as much
            return values
        sink = Sink(self._slots, private=True)
        dump(values, sink, main_by_value=self._main_by_value)
        payload = sink.payload()
        assert isinstance(payload, bytes)
        if len(payload) > INLINE_LIMIT:
            raise PayloadTooLarge(INLINE_LIMIT, _TOO_LARGE)
        return payload
