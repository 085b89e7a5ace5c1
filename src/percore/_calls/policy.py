"""The options of a call: key, retries and time limits.

A Policy holds the validated arguments of `options(...)`; most calls have none. A Plan applies a policy to one call and counts its
attempts. The terms of a plan are the part that its worker gets.
"""

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Final, Protocol

from percore._common.call_options import CallOptions, checked, delay_of
from percore._common.callables import check_awaited
from percore._common.options import PREFETCH, Backoff, RetryOn
from percore._common.worker_errors import WorkerDied

if TYPE_CHECKING:
    from percore._common.rates import Rate

_NO_TERMS: Final = (None, None, False, 0, None, False, 0.0)


class Policy:
    """The validated options of a call. Treat it as immutable.

    It is no dataclass, because decorating one takes a millisecond of every start.

    Attributes:
        key: calls with equal keys are never on two workers at once. None: no key.
        retries: how many more attempts a failed call gets.
        retry_on: the errors to retry: an exception class, a tuple of them, or a predicate.
        backoff: seconds before the next attempt, or a function that takes the number of failed attempts and returns them.
        timeout: how many seconds one attempt may run. None: no limit.
        prefetch: how many items of a stream may be produced and not taken.
        queue_timeout: how many seconds the call may wait until it begins for the first time. None: no limit.
        queue_left: the part of `queue_timeout` that is left when the call is accepted.
        rate: how many calls of the key begin in how much time. None: no limit.
        asks_for_retries: whether the call's own `options` set retries, retry_on or backoff. Retries of the runner do not count: a
            broadcast ignores those.
        hard_timeout: how many seconds one attempt may run, whatever it does. None: no limit.
        is_limited: whether the policy has a time limit.
        has_clock: whether the supervisor keeps a clock for the call. Its worker alone keeps that of `timeout`.
        needs_plan: whether the policy has retries, a time limit or a rate.
        is_free: whether the policy has no time limit and no rate.
        lacks_key: whether it has a rate and no key.
    """

    __slots__ = (
        "asks_for_retries",
        "backoff",
        "hard_timeout",
        "has_clock",
        "is_free",
        "is_limited",
        "key",
        "lacks_key",
        "needs_plan",
        "prefetch",
        "queue_left",
        "queue_timeout",
        "rate",
        "retries",
        "retry_on",
        "timeout",
    )

    key: Hashable | None
    retries: int
    retry_on: RetryOn
    backoff: Backoff
    timeout: float | None
    prefetch: int
    queue_timeout: float | None
    queue_left: float | None
    hard_timeout: float | None
    rate: "Rate | None"
    asks_for_retries: bool
    has_clock: bool
    is_limited: bool
    needs_plan: bool
    is_free: bool
    lacks_key: bool

    def __init__(  # noqa: PLR0913  # each is a documented option
        self,
        *,
        key: Hashable | None = None,
        retries: int = 0,
        retry_on: RetryOn = WorkerDied,
        backoff: Backoff = 0.0,
        timeout: float | None = None,
        prefetch: int = PREFETCH,
        queue_timeout: float | None = None,
        hard_timeout: float | None = None,
        rate: "Rate | None" = None,
        asks_for_retries: bool = False,
    ) -> None:
        self.key = key
        self.retries = retries
        self.retry_on = retry_on
        self.backoff = backoff
        self.timeout = timeout
        self.prefetch = prefetch
        self.queue_timeout = self.queue_left = queue_timeout
        self.hard_timeout = hard_timeout
        self.rate = rate
        self.asks_for_retries = asks_for_retries
        self.has_clock = queue_timeout is not None or hard_timeout is not None
        self.is_limited = self.has_clock or timeout is not None
        self.needs_plan = retries > 0 or self.is_limited or rate is not None
        self.is_free = not self.is_limited and rate is None
        self.lacks_key = rate is not None and key is None

    @classmethod
    def checked(  # noqa: PLR0913  # each is a documented option
        cls,
        *,
        key: Hashable | None,
        retries: int | None,
        retry_on: RetryOn | None,
        backoff: Backoff,
        timeout: float | None,
        prefetch: int = PREFETCH,
        queue_timeout: float | None = None,
        hard_timeout: float | None = None,
        rate: "Rate | None" = None,
        inherited: int = 0,
    ) -> "Policy":
        """Validate options and return their policy. `inherited`: the runner's retries, which apply if `retries` is None.

        Raises:
            TypeError, ValueError: an option is invalid; the message says what is valid.
        """
        try:
            hash(key)
        except TypeError as error:
            raise TypeError(f"a key must be hashable, such as a string, not {key!r}") from error
        if key is not None and hasattr(type(key), "__await__"):
            raise TypeError(f"a key is a value, such as a string, not {key!r}: await it first")
        given = CallOptions(retries, retry_on, backoff, timeout, prefetch, queue_timeout, hard_timeout)
        if rate is not None and not _is_rate(rate):
            raise TypeError(f"rate must be a percore.Rate, as in percore.Rate(10, per=1), not {rate!r}")
        return cls.of(checked(given, inherited), inherited, key, rate)

    @classmethod
    def of(cls, options: CallOptions, inherited: int = 0, key: Hashable | None = None, rate: "Rate | None" = None) -> "Policy":
        """Return the policy of checked options. `inherited`: the runner's retries, which apply if the options have none."""
        return cls(
            key=key,
            retries=inherited if options.retries is None else options.retries,
            retry_on=WorkerDied if options.retry_on is None else options.retry_on,
            backoff=options.backoff,
            timeout=options.timeout,
            prefetch=options.prefetch,
            queue_timeout=options.queue_timeout,
            hard_timeout=options.hard_timeout,
            rate=rate,
            asks_for_retries=options.asks_for_retries,
        )

    def for_broadcast(self) -> "Policy | None":
        """Return the policy of a broadcast with these options: only its time limits apply. None: it has none.

        Raises:
            TypeError: the options set a key, a rate, retries, retry_on or backoff.
        """
        if self.rate is not None:
            raise TypeError("a rate counts the calls of one key, and a broadcast goes to each worker once: call it without rate")
        if self.key is not None or self.asks_for_retries:
            raise TypeError(
                "a broadcast goes to each worker once, so a key, retries, retry_on and backoff do not apply to it: "
                "call runner.broadcast(...), or runner.options(timeout=...).broadcast(...)"
            )
        if not self.is_limited:
            return None
        return Policy(timeout=self.timeout, queue_timeout=self.queue_timeout, hard_timeout=self.hard_timeout)

    def for_stream(self) -> "Policy":
        """Return the policy of a stream with these options: its key, its rate and `prefetch`.

        Raises:
            TypeError: the options set retries, retry_on, backoff or a time limit, or a rate without a key.
        """
        given = CallOptions(
            int(self.asks_for_retries),
            timeout=self.timeout,
            queue_timeout=self.queue_timeout,
            hard_timeout=self.hard_timeout,
        )
        given.check_stream()
        if self.lacks_key:
            raise self.no_key()
        return Policy(key=self.key, rate=self.rate, prefetch=self.prefetch)

    @staticmethod
    def no_key() -> TypeError:
        """Return the error of a call with a rate and without a key."""
        return TypeError(
            "a rate counts the calls of one key, and this call has none: give both, as in "
            "runner.options(key=host, rate=percore.Rate(10, per=1)).run(fetch, url)"
        )

    def is_worth_it(self, error: BaseException) -> bool:
        """Return whether `retry_on` selects this error. Runs user code, which may raise.

        Raises:
            TypeError: retry_on returned an awaitable.
        """
        wanted: Any = self.retry_on
        if isinstance(wanted, type | tuple):
            return isinstance(error, wanted)
        answer = wanted(error)
        check_awaited("retry_on", answer)
        return bool(answer)

    def delay(self, failed: int) -> float:
        """Return how many seconds to wait after `failed` failed attempts. Runs user code, which may raise.

        Raises:
            TypeError, ValueError: backoff did not return a number of seconds.
        """
        if not callable(self.backoff):
            return self.backoff
        seconds = self.backoff(failed)
        check_awaited("backoff", seconds)
        return delay_of(seconds, "the value that backoff returned")

    @property
    def key_value(self) -> object:
        """The user's key; None: there is none. `key` itself is its name in the runner."""
        return getattr(self.key, "value", self.key)

    @property
    def is_plain(self) -> bool:
        """Whether the policy has no key and no time limit. Only then may calls travel in batches."""
        return self.key is None and not self.is_limited

    def after(self, seconds: float) -> "Policy":
        """Return this policy for a call that has waited for so long before the runner accepts it.

        Raises:
            TimeoutError: the call has waited for too long.
        """
        if self.queue_timeout is None:
            return self
        if seconds >= self.queue_timeout:
            raise TimeoutError(f"the runner did not accept the call within queue_timeout={self.queue_timeout:g} s")
        from copy import copy  # not needed for a start

        policy = copy(self)
        policy.queue_left = self.queue_timeout - seconds
        return policy


DEFAULT: Final = Policy()


class Timer(Protocol):
    """The timer of the next attempt."""

    def when(self) -> float: ...

    def cancel(self) -> None: ...


class CallPlan:
    """The policy of one call, and the state of its attempts."""

    __slots__ = ("begin_by", "failed", "hard_by", "late", "policy", "started", "terms", "timer", "verdict")

    def __init__(
        self, policy: Policy, context: Any = None, *, is_broadcast: bool = False, prefetch: int = 0, patience: float = 0.0
    ) -> None:
        """`prefetch`: the first credits of a stream; 0 for other calls. `patience`: as in `Terms`."""
        self.policy = policy
        self.failed = 0
        """How many attempts have failed."""
        self.late: float | None = None
        """Set when a plain function has exceeded its timeout: seconds from the end of its thread's work to the next attempt.

        So also when a call has exceeded its hard timeout; then `verdict` may be set, too."""
        self.verdict: BaseException | None = None
        """The error with which the call ends once its attempt has ended; None: its next attempt follows."""
        self.started: float | None = None
        """When the worker has announced the start of this attempt, if it does; a time of the monotonic clock."""
        self.timer: Timer | None = None
        """Set while the call waits for its next attempt."""
        self.begin_by: float | None = None
        """When the call must have begun, as a time of the monotonic clock. None: no limit, or it has begun before."""
        self.hard_by: float | None = None
        """When to look whether the call exceeds its hard timeout. None: it has none."""
        self.terms: tuple[float | None, Any, bool, int, float | None, bool, float] | None = None
        if context is not None or is_broadcast or prefetch:
            self.terms = policy.timeout, context, is_broadcast, prefetch, None, False, patience
        """What the worker gets before the call: timeout, context variables, whether it is a broadcast, the first credits of a
        stream, `begin_by` if no BEGIN_BY gives it, whether the worker announces the start, and the patience of a stream. None:
        nothing, or nothing but what BEGIN_BY and TIMEOUT give."""

    def set_begin_by(self, when: float | None) -> None:
        """Set `begin_by` in the terms."""
        _, context, is_broadcast, prefetch, _, announces, patience = self.terms or _NO_TERMS
        self.terms = self.policy.timeout, context, is_broadcast, prefetch, when, announces, patience

    @property
    def announces(self) -> bool:
        """Whether the worker announces the start."""
        return self.terms is not None and self.terms[5]

    def announce(self) -> None:
        """Let the worker announce the start."""
        _, context, is_broadcast, prefetch, begin_by, _, patience = self.terms or _NO_TERMS
        self.terms = self.policy.timeout, context, is_broadcast, prefetch, begin_by, True, patience


def _is_rate(value: object) -> bool:
    from percore._common.rates import Rate  # few programs have one

    return isinstance(value, Rate)
