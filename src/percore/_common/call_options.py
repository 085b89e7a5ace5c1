"""The options of calls that both sides check: a runner checks those of its calls, a worker those of nested calls."""

from typing import Any, Final, NamedTuple

from percore._common.callables import check_plain
from percore._common.options import PREFETCH, Backoff, RetryOn, seconds_of, whole

_MOST_RETRIES: Final = 1_000_000
_LONGEST_DELAY: Final = 1e9
_MOST_PREFETCHED: Final = 1_000_000

_OF_THE_VIEW: Final = "it is an option of the calls, as in runner.options({0}=...).map(...)"
_OF_THE_RUNNER: Final = "the number of workers is the runner's, as in percore.Runner(workers=4)"
_NO_CHUNKS: Final = "there is no chunk size to tune, percore batches short calls by how long they take"
MAP_ADVICE: Final = {
    "chunksize": _NO_CHUNKS,
    "batch_size": _NO_CHUNKS,
    "timeout": "for each call write runner.options(timeout=...).map(...), for the map as a whole asyncio.timeout(...) around it",
    "buffersize": "window=... says how many items may be pulled and not yet handed over",
    "max_workers": _OF_THE_RUNNER,
    "workers": _OF_THE_RUNNER,
} | {name: _OF_THE_VIEW.format(name) for name in ("retries", "retry_on", "backoff")}
"""Advice for keyword arguments of other libraries' maps and of other methods, by name."""


class CallOptions(NamedTuple):
    """The validated options of calls, without the key; `Policy` says what they mean.

    Attributes:
        retries: as given; None: those of the runner.
        retry_on: None: WorkerDied.
    """

    retries: int | None = None
    retry_on: RetryOn | None = None
    backoff: Backoff = 0.0
    timeout: float | None = None
    prefetch: int = PREFETCH
    queue_timeout: float | None = None
    hard_timeout: float | None = None

    @property
    def asks_for_retries(self) -> bool:
        """Whether retries, retry_on or backoff were given."""
        return bool(self.retries or self.backoff) or self.retry_on is not None

    def check_stream(self) -> None:
        """Check that these options may be those of a stream.

        Raises:
            TypeError: they set retries, retry_on, backoff or a time limit.
        """
        if self.asks_for_retries:
            raise TypeError(
                "percore does not retry a stream, since its consumer has seen some of the items: "
                "retries, retry_on and backoff do not apply to it. Catch the error, and open another stream"
            )
        if self.timeout is not None or self.hard_timeout is not None:
            raise TypeError(
                "timeout limits a call in its worker, and a stream also waits there for its consumer: "
                "write `async with asyncio.timeout(...)` around the `async for`, or inside the generator around its awaits"
            )
        if self.queue_timeout is not None:
            raise TypeError(
                "queue_timeout does not apply to a stream, whose consumer waits for items: "
                "write `async with asyncio.timeout(...)` around the wait for the first item"
            )


def checked(given: CallOptions, inherited: int) -> CallOptions:
    """Validate options. `inherited`: the runner's retries, which apply if `given` has none.

    Raises:
        TypeError, ValueError: an option is invalid; the message says what is valid.
    """
    # Users may create a view for each call, so this skips the checks of options that were not given.
    retries, retry_on, backoff, timeout, prefetch, queue_timeout, hard_timeout = given
    if retries is not None and (retries.__class__ is not int or retries):
        whole("retries", retries, 0, _MOST_RETRIES)
    if retry_on is not None:
        _check_retry_on(retry_on)
    if backoff.__class__ is not float or backoff:
        backoff = _checked_backoff(backoff)
    if timeout is not None:
        timeout = seconds_of("timeout", timeout)
    if prefetch.__class__ is not int or prefetch != PREFETCH:
        whole("prefetch", prefetch, 1, _MOST_PREFETCHED)
    if queue_timeout is not None:
        queue_timeout = seconds_of("queue_timeout", queue_timeout)
    if hard_timeout is not None:
        hard_timeout = seconds_of("hard_timeout", hard_timeout)
    if (retry_on is not None or backoff) and retries is None and not inherited:
        raise TypeError(
            "retry_on and backoff do nothing without retries, and this runner has none: "
            "give both, as in runner.options(retries=3, retry_on=ConnectionError)"
        )
    return CallOptions(retries, retry_on, backoff, timeout, prefetch, queue_timeout, hard_timeout)


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
    """Return `value` as a float if it is a number of seconds, zero or more.

    Raises:
        TypeError, ValueError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number of seconds, not {value!r}")
    if not value >= 0:  # also catches NaN
        raise ValueError(f"{name} must be zero or more seconds, not {value!r}")
    return float(min(value, _LONGEST_DELAY))  # min() first: an int may be too large for a float
