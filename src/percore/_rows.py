"""From what a map pulls to what is sent: rows of arguments become items, or runs of items for batches."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from percore._calls import Function, Functions
from percore._core.batches import Run
from percore._core.names import Name
from percore._errors import as_error
from percore._ipc.codec import SMALL, encode_small, is_inline, weight_inline, weight_of
from percore._items import size_of
from percore._options import check_awaited
from percore._policy import Policy
from percore._shares import Share

_SMALL: Final = 16_384
"""Bytes of pickled arguments up to which they travel in a batch."""


@dataclass(frozen=True, slots=True)
class Spec:
    """How a map was asked for.

    Attributes:
        ordered: results in the order of the inputs, or as they come.
        window: exactly so many items pulled and not handed over. None: as it fits.
        key: gives the key of a row's arguments.
        return_exceptions: errors in the place of results.
        pairs: (item, result) instead of results.
        star: each item is a tuple of arguments.
        policy: what its calls are run under.
    """

    ordered: bool
    window: int | None
    key: Callable[..., Hashable] | None
    return_exceptions: bool
    pairs: bool
    star: bool
    policy: Policy | None


class Taker(Protocol):
    """Who takes what rows have become, in order."""

    def is_done(self) -> bool:
        """Whether it takes no more."""

    def name_of(self, key: Hashable) -> Name:
        """What stands for a key from now on. Runs user code, which may raise."""

    def take_run(self, run: Run, size: int) -> None:
        """Items for batches; `size`: bytes of their pickled arguments."""

    def take_item(self, body: Any, key: Name | None, shares: list[Share]) -> None:
        """An item that goes alone, and holds these."""

    def take_failure(self, error: BaseException) -> None:
        """An item that cannot be sent: the user's objects have failed."""


class Rows:
    """Turns rows into items. Runs user code: iterating rows, keys, pickling."""

    def __init__(
        self, functions: Functions, function: Function, spec: Spec, taker: Taker, *, is_single: bool, is_batched: bool
    ) -> None:
        self._functions = functions
        self._function = function
        self._spec = spec
        self._taker = taker
        self._is_single = is_single
        self._is_bare = is_single and not spec.star
        self._is_batched = is_batched

    def submit(self, number: int, rows: list[Any]) -> int:
        """Rows of which the first has this number. How many were taken.

        Pickling one may end the map, or the runner, in any way: then the others are of no use.
        """
        if self._is_batched and self._is_bare:
            data = encode_small(rows)
            weight = SMALL if data else weight_inline(rows)
            if weight is not None:
                self._taker.take_run(Run(number, rows, True, weight, data), 0)
                return len(rows)
        for place, row in enumerate(rows):
            try:
                is_taken = not self._taker.is_done() and self._submit_row(number + place, row)
            except KeyboardInterrupt:  # taken for the terminal's
                raise
            except BaseException as error:  # user code: its failure is this item's
                if is_taken := not self._taker.is_done():
                    self._taker.take_failure(as_error(error, "pickling"))
            if not is_taken:
                return place
        return len(rows)

    def _submit_row(self, number: int, row: Any) -> bool:
        """Whether it was taken."""
        args = tuple(row) if self._spec.star else (row,) if self._is_single else row
        key = None
        if self._spec.key is not None and (given := self._spec.key(*args)) is not None:
            check_awaited("key", given)
            key = self._taker.name_of(given)
        is_scalar = bool(self._function.number) and is_inline(args)
        shares: list[Share] = []
        body: Any = args
        if not is_scalar:
            body, shares = self._functions.pickle(self._function, args, {})
        if self._taker.is_done():
            self._functions.discard(body)
            return False
        size = size_of(body)
        if not self._is_batched or type(body) is int or size > _SMALL or shares:
            self._taker.take_item(body, key, shares)
            return True
        weight = size or weight_of(args)
        assert weight is not None  # since `is_inline` is true of them
        self._taker.take_run(Run(number, [body], False, weight), size)
        return True
