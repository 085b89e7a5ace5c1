"""What a call is run under: its key, its further attempts, how long one may take, the context it sees.

A policy is what `options(...)` was given, checked; most calls have none. Terms are what one call makes of it.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from percore._broken import WorkerDied
from percore._options import check_awaited, check_plain, seconds_of, whole

if TYPE_CHECKING:
    import asyncio

RetryOn: TypeAlias = type[BaseException] | tuple[type[BaseException], ...] | Callable[[BaseException], object]
Backoff: TypeAlias = float | Callable[[int], float]

_MOST_RETRIES: Final = 1_000_000
_LONGEST_DELAY: Final = 1e9


@dataclass(slots=True, kw_only=True)
class Policy:
    """Checked options of a call. Never changed: it is not frozen only because that costs more than all the checks.

    Attributes:
        key: calls of equal keys are never on two workers at once. None: no key.
        retries: further attempts.
        retry_on: which errors are worth one: classes, or a predicate.
        backoff: seconds before the next attempt, or a function of the number of failed ones that tells.
        timeout: seconds one attempt may run. None: as long as it takes.
        asks_for_retries: whether its own `options` speak of retries. They may also be the runner's, which a broadcast ignores.
        needs_plan: whether there is more to it than a key.
    """

    key: Hashable | None = None
    retries: int = 0
    retry_on: RetryOn = WorkerDied
    backoff: Backoff = 0.0
    timeout: float | None = None
    asks_for_retries: bool = field(default=False, repr=False, compare=False)
    needs_plan: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.needs_plan = self.retries > 0 or self.timeout is not None

    @classmethod
    def checked(
        cls,
        *,
        key: Hashable | None,
        retries: int | None,
        retry_on: RetryOn | None,
        backoff: Backoff,
        timeout: float | None,
        inherited: int = 0,
    ) -> "Policy":
        """The policy of these options. `inherited`: the retries of the runner, which count where `retries` is None.

        Raises:
            TypeError, ValueError: a bad one; the text says what is right.
        """
        # A view may be made for each call: what was not given is not looked at.
        asks_for_retries = bool(retries)
        if is_silent := retries is None:
            retries = inherited
        try:
            hash(key)
        except TypeError as error:
            raise TypeError(f"a key must be hashable, such as a string, not {key!r}") from error
        if key is not None and hasattr(type(key), "__await__"):
            raise TypeError(f"a key is a value, such as a string, not {key!r}: await it first")
        if retries.__class__ is not int or retries:
            whole("retries", retries, 0, _MOST_RETRIES)
        if retry_on is None:
            retry_on = WorkerDied
        else:
            _check_retry_on(retry_on)
            asks_for_retries = True
        if backoff.__class__ is not float or backoff:
            backoff = _checked_backoff(backoff)
        if timeout is not None:
            timeout = seconds_of("timeout", timeout)
        asks_for_retries = asks_for_retries or bool(backoff)
        if asks_for_retries and not retries and is_silent:
            raise TypeError(
                "retry_on and backoff do nothing without retries, and this runner has none: "
                "give both, as in runner.options(retries=3, retry_on=ConnectionError)"
            )
        return cls(
            key=key,
            retries=retries,
            retry_on=retry_on,
            backoff=backoff,
            timeout=timeout,
            asks_for_retries=asks_for_retries,
        )

    def for_broadcast(self) -> "Policy | None":
        """The policy of a broadcast under this one: only the timeout applies.

        Raises:
            TypeError: its options speak of a key or of retries.
        """
        if self.key is not None or self.asks_for_retries:
            raise TypeError(
                "a broadcast goes to each worker once, so a key, retries, retry_on and backoff do not apply to it: "
                "call runner.broadcast(...), or runner.options(timeout=...).broadcast(...)"
            )
        return Policy(timeout=self.timeout) if self.timeout is not None else None

    def is_worth_it(self, error: BaseException) -> bool:
        """Whether another attempt is wanted after this error. Runs user code, which may raise.

        Raises:
            TypeError: retry_on gave something to be awaited.
        """
        wanted: Any = self.retry_on
        if isinstance(wanted, type | tuple):
            return isinstance(error, wanted)
        answer = wanted(error)
        check_awaited("retry_on", answer)
        return bool(answer)

    def delay(self, failed: int) -> float:
        """Seconds to wait after so many failed attempts. Runs user code, which may raise.

        Raises:
            TypeError, ValueError: backoff gave no number of seconds.
        """
        if not callable(self.backoff):
            return self.backoff
        seconds = self.backoff(failed)
        check_awaited("backoff", seconds)
        return delay_of(seconds, "the value that backoff returned")

    @property
    def is_plain(self) -> bool:
        """Whether nothing in it concerns the worker or the choice of it, so that calls may travel in batches."""
        return self.key is None and self.timeout is None


DEFAULT: Final = Policy()


def _check_retry_on(retry_on: Any) -> None:
    if isinstance(retry_on, list):
        raise TypeError("retry_on must be an exception class, a tuple of them or a predicate, not a list")
    classes = retry_on if isinstance(retry_on, tuple) else (retry_on,) if isinstance(retry_on, type) else None
    if classes is None:
        if not callable(retry_on):
            raise TypeError(f"retry_on must be an exception class, a tuple of them or a predicate, not {retry_on!r}")
        check_plain("retry_on", retry_on)
        return
    for one in classes:
        if not (isinstance(one, type) and issubclass(one, BaseException)):
            raise TypeError(f"retry_on must name exception classes, not {one!r}")


def _checked_backoff(backoff: Backoff) -> Backoff:
    if callable(backoff):
        check_plain("backoff", backoff)
        return backoff
    return delay_of(backoff, "backoff")


def delay_of(value: object, name: str) -> float:
    """A number of seconds to wait, checked: zero or more.

    Raises:
        TypeError, ValueError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds, not {value!r}")
    if not value >= 0:  # a NaN is neither
        raise ValueError(f"{name} must be zero or more seconds, not {value!r}")
    return float(min(value, _LONGEST_DELAY))  # an int may be beyond any float


class Plan:
    """What one call is run under, and how far it has come."""

    __slots__ = ("failed", "late", "policy", "terms", "timer")

    def __init__(self, policy: Policy, context: Any = None, *, is_beside: bool = False) -> None:
        self.policy = policy
        self.failed = 0
        """Attempts that have failed."""
        self.late: float | None = None
        """Its thread has run for too long: seconds from its end to the next attempt."""
        self.timer: asyncio.TimerHandle | None = None
        """While the call waits for its next attempt."""
        self.terms: tuple[float | None, Any, bool] | None = None
        if context is not None or policy.timeout is not None or is_beside:
            self.terms = policy.timeout, context, is_beside
        """What its worker has to know before it gets the call."""
