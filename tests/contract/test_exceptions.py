"""What calls raise and return that is not plain: it arrives as itself or as a RemoteError, and the worker lives on."""

import asyncio
import bdb
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pytest

import percore
from tests import jobs
from tests.contract.conftest import MakeRunner

BOTH = pytest.mark.parametrize("fn", [jobs.fail, jobs.afail])


async def _pid(runner: percore.Runner) -> int:
    worker: percore.CurrentWorker = await runner.run(jobs.where)
    return worker.pid


async def _error(runner: percore.Runner, fn: Callable[..., Any], *args: Any) -> BaseException:
    """What the call fails with; the worker has to survive it."""
    pid = await _pid(runner)
    future = runner.submit(fn, *args)
    await asyncio.wait([future])
    assert not future.cancelled()
    error = future.exception()
    assert error is not None
    assert await _pid(runner) == pid
    assert runner.statistics().restarts == 0
    return error


@BOTH
async def test_an_exception_arrives_as_itself(make: MakeRunner, fn: Callable[..., Any]) -> None:
    async with make() as runner:
        error = await _error(runner, fn, jobs.PageError("http://x", 404))
    assert type(error) is jobs.PageError
    assert error.args == ("http://x", 404)
    assert (error.url, error.status) == ("http://x", 404)


@BOTH
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_s5_the_remote_traceback_is_its_cause(make: MakeRunner, fn: Callable[..., Any]) -> None:
    async with make() as runner:
        error = await _error(runner, fn, ValueError("bad"))
    text = str(error.__cause__)
    assert "Traceback" in text
    assert f"in {fn.__name__}" in text
    assert text.rstrip().rstrip('"').rstrip().endswith("ValueError: bad")
    assert text in "".join(traceback.format_exception(error))


@pytest.mark.parametrize("fn", [jobs.fail, jobs.afail, jobs.fail_from, jobs.fail_with_group])
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_no_frame_of_percore_is_in_a_remote_traceback(
    make: MakeRunner, fn: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = (ValueError("bad"),) if fn in (jobs.fail, jobs.afail) else ()
    own = f'File "{os.path.dirname(percore.__file__)}'
    async with make() as runner:
        assert own not in await _remote_text(runner, fn, *args)
    monkeypatch.setenv("PERCORE_TRACEBACKS", "full")
    async with make() as runner:
        text = await _remote_text(runner, fn, *args)
        assert own in text
        assert f"in {fn.__name__}" in text


async def _remote_text(runner: percore.Runner, fn: Callable[..., Any], *args: Any) -> str:
    """The end of the chain of causes."""
    error: BaseException | None = await _error(runner, fn, *args)
    text = ""
    while error is not None:
        text, error = str(error), error.__cause__
    assert "Traceback" in text
    return text


@pytest.mark.parametrize("fn", [jobs.debug, jobs.adebug])
async def test_a_breakpoint_in_a_worker_says_which_debugger_works_there(make_real: MakeRunner, fn: Callable[..., Any]) -> None:
    async with make_real() as runner:
        error = await _error(runner, fn)
    if sys.version_info >= (3, 14):  # pdb then raises SystemExit
        assert isinstance(error, percore.RemoteError)
        assert error.type_name == "SystemExit"
    else:
        assert type(error) is bdb.BdbQuit
    assert "PYTHONBREAKPOINT=remote_pdb.set_trace" in str(error.__cause__)


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_a_cause_arrives_and_the_remote_traceback_ends_the_chain(make: MakeRunner) -> None:
    async with make() as runner:
        error = await _error(runner, jobs.fail_from)
    assert type(error) is jobs.PageError
    assert type(error.__cause__) is KeyError
    assert error.__cause__.args == ("inner",)
    assert "in fail_from" in str(error.__cause__.__cause__)


async def test_notes_and_attributes_arrive(make: MakeRunner) -> None:
    async with make() as runner:
        error = await _error(runner, jobs.fail_with_note)
    assert error.__notes__ == ["seen at night"]
    assert error.seen == 3  # type: ignore[attr-defined]


async def test_s5_a_group_arrives(make: MakeRunner) -> None:
    async with make() as runner:
        error = await _error(runner, jobs.fail_with_group)
    assert isinstance(error, ExceptionGroup)
    assert [type(member) for member in error.exceptions] == [ValueError, jobs.PageError]


@BOTH
async def test_what_is_no_exception_is_a_remote_error(make: MakeRunner, fn: Callable[..., Any], subtests: pytest.Subtests) -> None:
    async with make() as runner:
        for raised in (SystemExit(3), KeyboardInterrupt(), GeneratorExit(), BaseException("base")):
            with subtests.test(repr(raised)):
                error = await _error(runner, fn, raised)
                assert type(error) is percore.RemoteError
                assert error.type_name == type(raised).__qualname__
                assert f"in {fn.__name__}" in error.remote_traceback


@pytest.mark.parametrize("fn", [jobs.foreign_cancel, jobs.cancel_itself])
async def test_a_cancellation_nobody_asked_for_is_a_remote_error(make: MakeRunner, fn: Callable[..., Any]) -> None:
    async with make() as runner:
        error = await _error(runner, fn)
    assert type(error) is percore.RemoteError
    assert error.type_name.endswith("CancelledError")


async def test_a_plain_function_that_raises_a_cancellation_is_a_remote_error(make: MakeRunner) -> None:
    async with make() as runner:
        error = await _error(runner, jobs.fail, asyncio.CancelledError())
    assert type(error) is percore.RemoteError


@BOTH
@pytest.mark.parametrize("raised", [StopIteration(5), StopAsyncIteration(5)])
async def test_stop_iteration_is_a_runtime_error(make: MakeRunner, fn: Callable[..., Any], raised: Exception) -> None:
    async with make() as runner:
        error = await _error(runner, fn, raised)
    assert type(error) is RuntimeError
    # Python itself turns one that leaves a coroutine into a RuntimeError.
    assert type(error.__cause__) is type(raised)


@pytest.mark.parametrize("kind", [jobs.Unpicklable, jobs.Unreadable])
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_s5_an_exception_that_does_not_survive_the_trip_is_a_remote_error(make: MakeRunner, kind: type[Exception]) -> None:
    async with make() as runner:
        error = await _error(runner, jobs.fail_with, kind)
    assert type(error) is percore.RemoteError
    assert error.type_name.rpartition(".")[2] == kind.__name__
    assert "in fail_with" in error.remote_traceback


async def test_s5_an_exception_without_text_arrives(make: MakeRunner) -> None:
    async with make() as runner:
        assert type(await _error(runner, jobs.fail_with, jobs.BadText)) is jobs.BadText


@pytest.mark.parametrize("fn", [jobs.echo, jobs.aecho])
async def test_an_exception_that_is_returned_is_a_value(make: MakeRunner, fn: Callable[..., Any]) -> None:
    async with make() as runner:
        result = await runner.run(fn, jobs.PageError("http://x", 200))
        assert type(result) is jobs.PageError
        assert type(await runner.run(fn, StopIteration(1))) is StopIteration
        assert type(await runner.run(fn, KeyboardInterrupt())) is KeyboardInterrupt


# What cannot be pickled


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_s1_arguments_that_cannot_be_pickled_fail_their_future_alone(make: MakeRunner) -> None:
    async with make() as runner:
        future = runner.submit(jobs.echo, jobs.RefusesPickle())
        with pytest.raises(ValueError, match="do not pickle me"):
            await future
        assert await runner.run(jobs.echo, 1) == 1
        assert runner.statistics().running == 0


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_s1_a_lock_cannot_be_an_argument(make: MakeRunner) -> None:
    async with make() as runner:
        with pytest.raises(TypeError, match="lock"):
            await runner.run(jobs.aecho, jobs.give("lock"))


@pytest.mark.parametrize("fn", [jobs.echo, jobs.aecho])
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_s2_arguments_that_cannot_be_read_fail_their_call_alone(make: MakeRunner, fn: Callable[..., Any]) -> None:
    async with make() as runner:
        error = await _error(runner, fn, jobs.RefusesUnpickle())
    assert type(error) is ValueError
    assert error.args == ("do not read me",)


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_s3_a_result_that_cannot_travel_says_what_to_return(make: MakeRunner, subtests: pytest.Subtests) -> None:
    advices = {
        "lock": "make one in each worker",
        "generator": "return a list",
        "refuses": "do not pickle me",
        "nested": "the result contains a lock",
        "unreadable": "could not be unpickled",
    }
    async with make() as runner:
        for what, advice in advices.items():
            with subtests.test(what):
                error = await _error(runner, jobs.give, what)
                assert type(error) is percore.RemoteError
                assert advice in str(error)


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_a_coroutine_as_result_says_to_await_it(make: MakeRunner) -> None:
    async with make() as runner:
        error = await _error(runner, jobs.agive_coroutine)
    assert type(error) is percore.RemoteError
    assert "await it in the worker" in str(error)
