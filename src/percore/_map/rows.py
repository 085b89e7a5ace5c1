"""Turns the rows of arguments that a map pulls into single items, or into runs of items for batches."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from percore._calls.functions import Function, Functions
from percore._calls.policy import Policy
from percore._calls.shared_objects import Share
from percore._common.callables import check_awaited
from percore._common.errors import as_error
from percore._common.inputs import unpacked
from percore._map.progress import Wanted
from percore._scheduler.batching import Run
from percore._scheduler.key_names import Name, Names


@dataclass(frozen=True, slots=True)
class Spec:
    """The options of a map.

    Attributes:
        ordered: give results in the order of the inputs; else as they come.
        window: how many items may be pulled and not handed over; None: chosen automatically.
        key: returns the key of a call from its arguments; None: no keys.
        return_exceptions: give errors in place of results.
        pairs: give (item, result) instead of results.
        star: each item is a tuple of arguments.
        policy: the policy of the calls; None: that of the runner.
        progress: how to show how far the map is; None: not at all.
    """

    ordered: bool
    window: int | None
    key: Callable[..., Hashable] | None
    return_exceptions: bool
    pairs: bool
    star: bool
    policy: Policy | None
    progress: Wanted = None


class Taker(Protocol):
    """The receiver of the items, in order."""

    names: Names

    def is_done(self) -> bool:
        """Whether it takes no more items."""

    def take_run(self, run: Run, size: int) -> None:
        """Take items for batches. `size`: bytes of their pickled arguments."""

    def take_item(self, body: Any, size: int, key: Name | None, shares: Sequence[Share]) -> None:
        """Take an item that is sent as a call. `size`: bytes of its pickled arguments.

        It holds `shares`, the shared objects among its arguments, until it has ended.
        """

    def take_failure(self, error: BaseException) -> None:
        """Take the error of an item that cannot be sent because user code raised."""


class Rows:
    """Turns rows into items. This runs user code: it iterates over rows, computes keys and pickles arguments."""

    def __init__(
        self, functions: Functions, function: Function, spec: Spec, taker: Taker, *, is_single: bool, is_batched: bool
    ) -> None:
        self._functions = functions
        self._names = taker.names
        self._function = function
        self._spec = spec
        self._taker = taker
        self._is_single = is_single
        self._is_bare = is_single and not spec.star
        self._is_batched = is_batched
        self._store = functions.store
        self._passes = functions.store.passes

    def submit(self, number: int, rows: list[Any]) -> int:
        """Turn these rows into items; `number` is that of the first. Return how many were taken.

        User code may end the map or the runner while it runs. The remaining rows are then not taken.
        """
        if self._is_batched and self._is_bare:
            weighed = self._store.weigh_rows(rows)
            if weighed is not None:
                self._taker.take_run(Run(number, rows, True, *weighed), 0)
                return len(rows)
        for place, row in enumerate(rows):
            try:
                is_taken = not self._taker.is_done() and self._submit_row(number + place, row)
            except KeyboardInterrupt:  # treated as a Ctrl-C
                raise
            except BaseException as error:  # user code: only this item fails
                if is_taken := not self._taker.is_done():
                    self._taker.take_failure(as_error(error, "pickling"))
            if not is_taken:
                return place
        return len(rows)

    def _submit_row(self, number: int, row: Any) -> bool:
        """Turn one row into an item. Return whether it was taken."""
        args = unpacked(row) if self._spec.star else (row,) if self._is_single else row
        key = None
        if self._spec.key is not None and (given := self._spec.key(*args)) is not None:
            if type(given) is not str and type(given) is not int:
                check_awaited("key", given)
            key = self._names.of(given)
        is_scalar = bool(self._function.number) and self._passes(args)
        shares: Sequence[Share] = ()
        body: Any = args
        if not is_scalar:
            body, shares = self._functions.pickle(self._function, args, {})
        if self._taker.is_done():
            self._functions.discard(body, shares)
            return False
        size = self._functions.size_of(body)
        weight = self._store.weigh(body) if self._is_batched and not shares else None
        if weight is None:
            self._taker.take_item(body, size, key, shares)
        else:
            self._taker.take_run(Run(number, [body], False, weight), size)
        return True
