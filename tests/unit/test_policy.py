"""What a call is run under: what `options` refuses and in which words, and what retries make of it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percore._calls.policy import DEFAULT, CallPlan, Policy
from percore._common.call_options import delay_of
from percore._common.rates import Rate
from percore._common.worker_errors import WorkerDied
from tests.ids import steady

GOOD: dict[str, Any] = {"key": None, "retries": 0, "retry_on": None, "backoff": 0, "timeout": None}
DIED = WorkerDied(1, -9, "jobs.fetch", 0.5)


async def _asynchronous(_: object) -> bool:
    return False


class _Asynchronous:
    async def __call__(self, _: object) -> bool:
        return False


def _yielding(_: object) -> Iterator[bool]:
    yield False


async def _ayielding(_: object) -> AsyncIterator[bool]:
    yield False


NOT_PLAIN = pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (_asynchronous, "an async one"),
        (partial(partial(_asynchronous), 1), "an async one"),
        (_Asynchronous(), "an async one"),
        (_Asynchronous().__call__, "an async one"),
        (_yielding, "a generator function"),
        (_ayielding, "a generator function"),
    ],
    ids=["function", "partial", "object", "method", "generator", "async generator"],
)


def policy(**options: Any) -> Policy:
    return Policy.checked(**{**GOOD, **options})


def values(given: Policy) -> dict[str, object]:
    return {name: getattr(given, name) for name in Policy.__slots__ if name != "asks_for_retries"}


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return "Unhashable()"


class Failing:
    def __hash__(self) -> int:
        raise ZeroDivisionError


def test_the_default_is_none_of_it() -> None:
    assert values(policy()) == values(DEFAULT) == values(Policy())
    assert (DEFAULT.key, DEFAULT.retries, DEFAULT.backoff, DEFAULT.timeout) == (None, 0, 0.0, None)
    assert DEFAULT.retry_on is WorkerDied
    assert DEFAULT.is_plain


def test_what_is_given_is_kept() -> None:
    errors = OSError, ValueError
    given_policy = policy(key=("host", 80), retries=3, retry_on=errors, backoff=1, timeout=2)
    assert values(given_policy) == values(Policy(key=("host", 80), retries=3, retry_on=errors, backoff=1.0, timeout=2.0))
    assert type(given_policy.backoff) is float
    assert type(given_policy.timeout) is float


@pytest.mark.parametrize(
    ("options", "is_plain"),
    [
        ({}, True),
        ({"retries": 3, "retry_on": OSError, "backoff": 1.0}, True),
        ({"key": "host"}, False),
        ({"key": 0}, False),
        ({"timeout": 1}, False),
        ({"queue_timeout": 1}, False),
        ({"hard_timeout": 1}, False),
    ],
    ids=steady,
)
def test_what_concerns_the_worker_keeps_calls_out_of_batches(options: dict[str, Any], is_plain: bool) -> None:
    assert policy(**options).is_plain is is_plain


# Keys


def test_anything_hashable_is_a_key(subtests: pytest.Subtests) -> None:
    for key in ["host", 7, 0, "", (), ("a", 1), frozenset(), object(), int, 1.5]:
        with subtests.test(key=key):
            assert policy(key=key).key is key


@pytest.mark.parametrize("key", [[], {}, set(), Unhashable(), ("a", [])], ids=steady)
def test_a_key_must_be_hashable(key: object) -> None:
    with pytest.raises(TypeError, match=r"^a key must be hashable, such as a string, not ") as caught:
        policy(key=key)
    assert repr(key) in str(caught.value)


def test_what_a_hash_raises_is_the_users() -> None:
    with pytest.raises(ZeroDivisionError):
        policy(key=Failing())


async def test_a_key_is_awaited_by_its_user() -> None:
    coroutine = _asynchronous(1)
    for key in (coroutine, asyncio.ensure_future(coroutine)):
        with pytest.raises(TypeError, match=r"^a key is a value, such as a string, not <.*>: await it first$"):
            policy(key=key)
    await key


# Rates


def test_a_rate_is_what_it_says(subtests: pytest.Subtests) -> None:
    assert Rate(10, per=1) == Rate(n=10, per=1.0, burst=1)
    assert type(Rate(10, per=1).per) is float
    assert repr(Rate(10, per=1, burst=5)) == "Rate(n=10, per=1.0, burst=5)"
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"n": 0, "per": 1}, ValueError, r"^n must be from 1 to 1000000000, not 0$"),
        ({"n": 0.5, "per": 1}, TypeError, r"^n must be a whole number of calls, not 0\.5: .* as in Rate\(1, per=2\)$"),
        ({"n": "10", "per": 1}, TypeError, r"^n must be a whole number, not '10'$"),
        ({"n": True, "per": 1}, TypeError, r"^n must be a whole number, not True$"),
        ({"n": 10**10, "per": 1}, ValueError, r"^n must be from 1 to"),
        ({"n": 1, "per": 0}, ValueError, r"^per must be a positive number of seconds, not 0$"),
        ({"n": 1, "per": float("nan")}, ValueError, r"^per must be a positive number of seconds, not nan$"),
        ({"n": 1, "per": "s"}, TypeError, r"^per must be a number of seconds, not 's'$"),
        ({"n": 5, "per": 1, "burst": 6}, ValueError, r"^burst must be from 1 to 5, not 6$"),
        ({"n": 5, "per": 1, "burst": 0}, ValueError, r"^burst must be from 1 to 5, not 0$"),
    ]
    for arguments, error, match in wrong:
        with subtests.test(arguments=arguments), pytest.raises(error, match=match):
            Rate(**arguments)


def test_a_rate_needs_a_key_and_is_no_part_of_a_broadcast() -> None:
    rate = Rate(10, per=1)
    limited = policy(key="host", rate=rate)
    assert (limited.rate, limited.lacks_key, limited.is_limited, limited.needs_plan) == (rate, False, False, True)
    assert limited.for_stream().rate is rate
    without = policy(rate=rate)
    assert without.lacks_key
    with pytest.raises(TypeError, match="give both"):
        without.for_stream()
    with pytest.raises(TypeError, match="call it without rate"):
        without.for_broadcast()
    with pytest.raises(TypeError, match=r"rate must be a percore\.Rate, .* not 10"):
        policy(key="host", rate=10)
    assert not policy(key="host").needs_plan


def test_a_plan_announces_its_start_if_it_is_asked_to() -> None:
    plan = CallPlan(policy(key="host", rate=Rate(10, per=1)))
    assert not plan.announces
    plan.announce()
    plan.set_begin_by(5.0)
    assert plan.announces


# Retries


@pytest.mark.parametrize("retries", [1.5, "3", True, [1]], ids=steady)
def test_retries_are_a_whole_number(retries: object) -> None:
    with pytest.raises(TypeError, match=r"^retries must be a whole number, not "):
        policy(retries=retries)


def test_retries_that_are_not_given_are_the_runners() -> None:
    assert policy(retries=None).retries == 0
    assert policy(retries=None, inherited=3).retries == 3
    assert policy(retries=0, inherited=3).retries == 0
    assert policy(retries=5, inherited=3).retries == 5


@pytest.mark.parametrize("retries", [-1, 1_000_001, -(10**30)])
def test_retries_have_bounds(retries: int) -> None:
    with pytest.raises(ValueError, match=f"^retries must be from 0 to 1000000, not {retries}$"):
        policy(retries=retries)


def test_which_errors_are_worth_another_attempt(subtests: pytest.Subtests) -> None:
    for retry_on, error, is_worth_it in [
        (None, DIED, True),
        (None, OSError(), False),
        (OSError, ConnectionResetError(), True),
        (OSError, DIED, False),
        ((OSError, KeyError), KeyError("x"), True),
        ((OSError, (KeyError,))[0], KeyError("x"), False),
        ((), DIED, False),
        (TimeoutError, TimeoutError(), True),
        (BaseException, asyncio.CancelledError(), True),
        (lambda error: "again" in str(error), ValueError("again"), True),
        (lambda error: "again" in str(error), ValueError("never"), False),
        (lambda error: error.args, ValueError(), False),
        (lambda error: error.args, ValueError(0), True),
    ]:
        with subtests.test(retry_on=retry_on, error=error, is_worth_it=is_worth_it):
            assert policy(retry_on=retry_on).is_worth_it(error) is is_worth_it


@pytest.mark.parametrize("retry_on", [1, "OSError", OSError(), {}, object()], ids=steady)
def test_retry_on_is_classes_or_a_predicate(retry_on: object) -> None:
    with pytest.raises(TypeError, match=r"^retry_on must be an exception class, a tuple of them or a predicate, not "):
        policy(retry_on=retry_on)


def test_a_list_of_classes_is_told_what_is_right() -> None:
    with pytest.raises(TypeError, match=r"^retry_on must be an exception class, a tuple of them or a predicate, not a list$"):
        policy(retry_on=[OSError])


@pytest.mark.parametrize("retry_on", [int, (OSError, 5), (OSError, int), (OSError, (KeyError,)), ("OSError",)], ids=steady)
def test_only_exception_classes_are_named(retry_on: object) -> None:
    with pytest.raises(TypeError, match=r"^retry_on must name exception classes, not "):
        policy(retry_on=retry_on)


def test_a_failing_predicate_is_the_callers_to_handle() -> None:
    def fail(_error: BaseException) -> bool:
        raise LookupError

    with pytest.raises(LookupError):
        policy(retry_on=fail).is_worth_it(DIED)


@pytest.mark.parametrize("name", ["retry_on", "backoff"])
@NOT_PLAIN
def test_what_is_called_between_attempts_is_a_plain_function(name: str, fn: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be a plain function, not {kind}: percore calls it and does not "):
        policy(retries=1, **{name: fn})


def test_a_plain_function_that_returns_a_coroutine_is_found_out_when_it_does() -> None:
    given_policy = policy(retries=1, retry_on=lambda error: _asynchronous(error), backoff=lambda failed: _asynchronous(failed))
    with pytest.raises(
        TypeError, match=r"^retry_on must be a plain function: percore does not await <coroutine .*>, which it returned$"
    ):
        given_policy.is_worth_it(DIED)
    with pytest.raises(
        TypeError, match=r"^backoff must be a plain function: percore does not await <coroutine .*>, which it returned$"
    ):
        given_policy.delay(1)


@pytest.mark.parametrize("options", [{"retry_on": OSError}, {"backoff": 1}, {"backoff": float, "retry_on": callable}], ids=steady)
def test_without_retries_there_is_nothing_to_retry_on(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"^retry_on and backoff do nothing without retries, and this runner has none: give both"):
        policy(retries=None, **options)
    assert policy(retries=None, inherited=1, **options).retries == 1
    assert policy(retries=0, **options).retries == 0  # asked for, perhaps by a setting


# Delays


@pytest.mark.parametrize(("backoff", "delay"), [(0, 0.0), (0.25, 0.25), (3, 3.0), (float("inf"), 1e9), (10**400, 1e9)])
def test_a_delay_is_a_number_of_seconds(backoff: float, delay: float) -> None:
    for failed in (1, 2, 100):
        found = policy(backoff=backoff).delay(failed)
        assert found == delay
        assert type(found) is float


def test_a_function_of_the_failed_attempts_tells_the_delay() -> None:
    asked: list[int] = []

    def backoff(failed: int) -> float:
        asked.append(failed)
        return float(2**failed)

    given_policy = policy(backoff=backoff)
    assert asked == []
    assert [given_policy.delay(failed) for failed in (1, 2, 3)] == [2.0, 4.0, 8.0]
    assert asked == [1, 2, 3]


@pytest.mark.parametrize("value", ["1", None, True, 1j, [1], b"1"], ids=steady)
def test_a_delay_of_the_wrong_type(value: object) -> None:
    with pytest.raises(TypeError, match=r"^backoff must be a number of seconds, not "):
        policy(backoff=value)
    with pytest.raises(TypeError, match=r"^the value that backoff returned must be a number of seconds, not "):
        policy(backoff=lambda _failed: value).delay(1)


@pytest.mark.parametrize("value", [-1, -0.001, float("-inf"), float("nan"), -(10**400)])
def test_a_delay_below_zero(value: float) -> None:
    with pytest.raises(ValueError, match=r"^backoff must be zero or more seconds, not "):
        policy(backoff=value)
    with pytest.raises(ValueError, match=r"^the value that backoff returned must be zero or more seconds, not "):
        policy(backoff=lambda _failed: value).delay(1)


@given(st.one_of(st.floats(min_value=0), st.integers(min_value=0)))
def test_any_delay_is_finite(value: float) -> None:
    assert 0 <= delay_of(value, "backoff") <= 1e9


# Timeouts


@pytest.mark.parametrize(
    ("prefetch", "error"),
    [("1", TypeError), (True, TypeError), (1.5, TypeError), (0, ValueError), (-1, ValueError), (1_000_001, ValueError)],
    ids=steady,
)
def test_a_prefetch_is_a_number_of_items(prefetch: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"^prefetch must be "):
        policy(prefetch=prefetch)


def test_a_stream_has_a_key_and_a_prefetch_and_no_retries_or_timeout() -> None:
    assert values(policy(inherited=3).for_stream()) == values(Policy())
    assert values(policy(key="a", prefetch=3).for_stream()) == values(Policy(key="a", prefetch=3))
    for options in ({"retries": 2}, {"retries": 2, "retry_on": OSError}, {"timeout": 1}):
        with pytest.raises(TypeError, match="stream"):
            policy(**options).for_stream()


@pytest.mark.parametrize("timeout", ["1", True, [1], 1j], ids=steady)
def test_a_timeout_is_a_number_of_seconds(timeout: object) -> None:
    with pytest.raises(TypeError, match=r"^timeout must be a number of seconds, not "):
        policy(timeout=timeout)


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), 10**400])
def test_a_timeout_is_positive_and_finite(timeout: float) -> None:
    with pytest.raises(ValueError, match=r"^timeout must be a positive number of seconds, not "):
        policy(timeout=timeout)


# Broadcasts


@pytest.mark.parametrize("options", [{"key": "k"}, {"retries": 1}, {"retry_on": OSError}, {"backoff": 1}], ids=steady)
def test_a_broadcast_has_neither_a_key_nor_retries(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"^a broadcast goes to each worker once, so a key, retries, retry_on and backoff do not "):
        policy(**{"retries": None, "inherited": 2} | options).for_broadcast()


@pytest.mark.parametrize("retries", [None, 0])
def test_a_broadcast_leaves_the_runners_retries_alone(retries: int | None) -> None:
    assert policy(retries=retries, inherited=2).for_broadcast() is None
    limited = policy(retries=retries, inherited=2, timeout=5, queue_timeout=2).for_broadcast()
    assert limited is not None
    assert values(limited) == values(Policy(timeout=5.0, queue_timeout=2.0))


def test_what_a_call_waits_for_its_runner_is_part_of_its_queue_timeout() -> None:
    limited = policy(queue_timeout=2)
    assert limited.queue_left == 2.0
    later = limited.after(1.5)
    assert (later.queue_left, later.queue_timeout) == (0.5, 2.0)
    with pytest.raises(TimeoutError, match="the runner did not accept the call within queue_timeout=2 s"):
        limited.after(2)
    unlimited = policy(timeout=1)
    assert unlimited.after(5) is unlimited


# Plans


@pytest.mark.parametrize(
    ("options", "context", "is_broadcast", "terms"),
    [
        ({}, None, False, None),
        ({"retries": 3, "key": "host"}, None, False, None),
        ({"timeout": 2}, None, False, None),
        ({}, {0: "user"}, False, (None, {0: "user"}, False, 0, None, False, 0.0)),
        ({}, b"pickle", False, (None, b"pickle", False, 0, None, False, 0.0)),
        ({}, None, True, (None, None, True, 0, None, False, 0.0)),
        ({"timeout": 2}, {}, True, (2.0, {}, True, 0, None, False, 0.0)),
    ],
    ids=steady,
)
def test_a_worker_is_told_what_it_has_to_know_and_nothing_else(
    options: dict[str, Any], context: Any, is_broadcast: bool, terms: object
) -> None:
    plan = CallPlan(policy(**options), context, is_broadcast=is_broadcast)
    assert plan.terms == terms
    assert (plan.failed, plan.late, plan.timer) == (0, None, None)
