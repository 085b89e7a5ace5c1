"""percore's errors: their fields, their sentences, what they are, and that they travel."""

import asyncio
import copy
import pickle
import traceback
from concurrent.futures.process import BrokenProcessPool

import pytest

from percore._common.errors import (
    PayloadTooLarge,
    PercoreError,
    RemoteError,
    RemoteTraceback,
    RunnerClosed,
    RunnerFull,
    with_article,
)
from percore._common.worker_errors import RunnerBroken, StartupFailed, WorkerDied, how, signal_of

EXAMPLES: list[PercoreError] = [
    PercoreError("anything", 3),
    WorkerDied(4242, -9, "jobs.fetch", 1.25),
    WorkerDied(None, None, "jobs.fetch", None, started=False, attempts=0),
    WorkerDied(1, 3, "jobs.fetch", 0.5, True, 4),
    WorkerDied(1, -9, "jobs.fetch", 0.5, why="its channel broke"),
    WorkerDied(1, None, "jobs.fetch", 0.5, detail="its node was lost"),
    WorkerDied(1, -11, "jobs.fetch", 0.5, others={"jobs.parse": 3}),
    WorkerDied(1, -9, "jobs.fetch", 0.5, detail="killed by the kernel: out of memory", memory=2**30),
    WorkerDied(1, None, "jobs.fetch", 0.5, detail="its node b was lost: its connection was closed", node="b"),
    RunnerBroken(10, -11, "Traceback …"),
    RunnerBroken(10, None),
    RunnerBroken(0, None, "none was found within start_timeout=60 s"),
    StartupFailed("worker 0 died", "Traceback …"),
    StartupFailed("worker 0 died"),
    RunnerClosed("the runner was closed"),
    RunnerFull(1000),
    RemoteError("builtins.SystemExit", "3", "Traceback …"),
    RemoteError("builtins.SystemExit", ""),
    PayloadTooLarge(1024),
]
PUBLIC = [PercoreError, WorkerDied, RunnerBroken, StartupFailed, RunnerClosed, RunnerFull, RemoteError, PayloadTooLarge]


def ids(error: PercoreError) -> str:
    return type(error).__name__


def test_every_error_travels_whole(subtests: pytest.Subtests) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        for error in EXAMPLES:
            with subtests.test(error=error, protocol=protocol):
                error = copy.copy(error)
                error.add_note("noted on the way")
                error.extra = [1, 2]  # type: ignore[attr-defined]
                there = pickle.loads(pickle.dumps(error, protocol))
                assert type(there) is type(error)
                assert str(there) == str(error)
                assert there.args == error.args
                assert vars(there) == vars(error)
                assert there.__notes__ == ["noted on the way"]


def test_a_copy_is_the_same(subtests: pytest.Subtests) -> None:
    for error in EXAMPLES:
        with subtests.test(error=error):
            for twin in (copy.copy(error), copy.deepcopy(error)):
                assert twin is not error
                assert (type(twin), str(twin), vars(twin)) == (type(error), str(error), vars(error))


class Derived(PercoreError):
    """A user's own, derived from ours."""


def test_a_users_own_error_travels() -> None:
    there = pickle.loads(pickle.dumps(Derived("why", 7)))
    assert type(there) is Derived
    assert there.args == ("why", 7)


def test_there_is_a_sentence(subtests: pytest.Subtests) -> None:
    for error in EXAMPLES:
        with subtests.test(error=error):
            text = str(error)
            assert text
            assert "None" not in text.replace("worker None", "")
            assert text == text.strip()


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        (WorkerDied, [BrokenProcessPool]),
        (RunnerBroken, [BrokenProcessPool]),
        (StartupFailed, [BrokenProcessPool]),
        (RunnerClosed, [RuntimeError]),
        (RunnerFull, [RuntimeError]),
        (RemoteError, []),
        (PayloadTooLarge, [ValueError]),
    ],
)
def test_what_each_one_is(kind: type[PercoreError], others: list[type[Exception]]) -> None:
    assert issubclass(kind, PercoreError)
    assert all(issubclass(kind, base) for base in others)
    assert not issubclass(kind, asyncio.CancelledError)
    assert not issubclass(kind, OSError)  # of which TimeoutError is one
    assert issubclass(kind, RuntimeError) == (others in ([RuntimeError], [BrokenProcessPool]))


@pytest.mark.parametrize("kind", PUBLIC)
def test_they_are_known_by_their_public_names(kind: type[PercoreError]) -> None:
    import percore

    assert kind.__module__ == "percore"
    assert getattr(percore, kind.__name__) is kind


# Sentences


def test_a_death_by_signal() -> None:
    died = WorkerDied(4242, -9, "jobs.fetch", 1.25)
    assert (died.pid, died.exitcode, died.signal) == (4242, -9, "SIGKILL")
    assert (died.call, died.age, died.started, died.attempts) == ("jobs.fetch", 1.25, True, 1)
    assert str(died) == (
        "worker (pid 4242) died by SIGKILL (perhaps out of memory, or killed by an operator) while it ran jobs.fetch for 1.25 s. "
        "Not retried: it may have had side effects. If repeating is safe, call it again; "
        "a Runner does that by itself with `runner.options(retries=1)`, except for streams"
    )


def test_a_death_tells_what_else_ran_there() -> None:
    one = WorkerDied(7, -11, "fetch", 1.5, others={"parse": 1})
    assert "while it ran fetch for 1.5 s; 1 other call (parse) ran there, too. Not retried" in str(one)
    many = WorkerDied(7, -11, "fetch", others={"a": 1, "fetch": 40, "b": 2, "c": 1, "d": 1, "e": 1})
    assert "; 46 other calls (fetch ×40, b ×2, a, c, d, …) ran there, too. " in str(many)
    assert many.others["fetch"] == 40
    waiting = WorkerDied(7, -11, "fetch", started=False, attempts=0, others={"parse": 1})
    assert "before it began fetch; 1 other call (parse) ran there, too. " in str(waiting)


def test_a_call_that_was_repeated_says_how_often() -> None:
    death = WorkerDied(7, -9, "fetch", 1.5, attempts=3)
    assert str(death).endswith("while it ran fetch for 1.5 s. That was attempt 3; no retries are left")


def test_a_death_by_percore_says_why() -> None:
    died = WorkerDied(4242, -9, "jobs.fetch", 1.25, why="its channel broke: OSError()")
    assert str(died).startswith(
        "worker (pid 4242) was killed by percore (its channel broke: OSError()) while it ran jobs.fetch for 1.25 s. "
    )


def test_an_end_of_which_more_is_known_than_the_exit_code() -> None:
    died = WorkerDied(4242, None, "jobs.fetch", detail="its node was lost", node="b")
    assert str(died).startswith("worker (pid 4242 on node b) died (its node was lost) while it ran jobs.fetch. ")
    assert str(WorkerDied(None, None, "jobs.fetch", node="b")).startswith("the worker on node b died (exit status unknown)")
    assert how(-9, "its node was lost") == "by SIGKILL (its node was lost)"
    assert how(3, "its node was lost") == "with exit code 3 (its node was lost)"


def test_a_death_before_the_call_began() -> None:
    died = WorkerDied(4242, 3, "jobs.fetch", started=False, attempts=0)
    assert died.signal is None
    assert str(died) == "worker (pid 4242) died with exit code 3 before it began jobs.fetch. No other worker will run it"


def test_exit_codes_in_words(subtests: pytest.Subtests) -> None:
    for exitcode, name, words in [
        (None, None, "(exit status unknown)"),
        (0, None, "with exit code 0"),
        (137, None, "with exit code 137"),
        (-9, "SIGKILL", "out of memory"),
        (-11, "SIGSEGV", "native code"),
        (-7, "SIGBUS", "native code"),
        (-6, "SIGABRT", "native code"),
        (-4, "SIGILL", "another CPU"),
        (-15, "SIGTERM", "by SIGTERM"),
        (-1, "SIGHUP", "by SIGHUP"),
        (-200, "signal 200", "by signal 200"),
    ]:
        with subtests.test(exitcode=exitcode, name=name, words=words):
            assert signal_of(exitcode) == name
            assert words in how(exitcode)
            assert name is None or name in how(exitcode)


def test_a_broken_runner() -> None:
    broken = RunnerBroken(10, -11, "ModuleNotFoundError: No module named 'jobs'")
    assert (broken.deaths, broken.exitcode) == (10, -11)
    assert "died 10 times in a row before it began a call; the last one died by SIGSEGV" in str(broken)
    assert str(broken).endswith("The last report:\nModuleNotFoundError: No module named 'jobs'")
    assert "report" not in str(RunnerBroken(10, 1))


def test_a_failed_start() -> None:
    failed = StartupFailed("worker 0 could not start", "Traceback …")
    assert (failed.reason, failed.detail) == ("worker 0 could not start", "Traceback …")
    assert str(failed) == "worker 0 could not start\n\nTraceback …"
    assert str(StartupFailed("worker 0 could not start")) == "worker 0 could not start"


def test_something_remote() -> None:
    error = RemoteError("SystemExit", "3", "Traceback …")
    assert (error.type_name, error.text, error.remote_traceback) == ("SystemExit", "3", "Traceback …")
    assert str(error) == "SystemExit: 3"
    assert str(RemoteError("SystemExit", "")) == "SystemExit"


def test_a_payload_too_large_says_what_to_do() -> None:
    error = PayloadTooLarge(1024)
    assert error.limit == 1024
    assert "max_message=1024 bytes" in str(error)
    assert "larger max_message" in str(error)


def test_a_class_is_named_with_its_article() -> None:
    named = {name: with_article(name) for name in ("lock", "Event", "RLock", "Union", "FileIO", "SSLSocket", "Lock", "M", "_io")}
    assert [name for name, text in named.items() if text == f"an {name}"] == ["Event", "RLock", "SSLSocket"]
    assert all(text.endswith(f" {name}") for name, text in named.items())


def test_a_full_runner_says_who_waits_and_who_does_not() -> None:
    full = RunnerFull(1000)
    assert full.limit == 1000
    assert str(full) == ("runner full: max_pending=1000 calls are pending; submit() never waits, `await runner.run(...)` does")


def test_a_closed_runner() -> None:
    assert RunnerClosed("it was closed").reason == str(RunnerClosed("it was closed")) == "it was closed"


def test_a_remote_traceback_reads_as_the_standard_librarys() -> None:
    carried = RemoteTraceback("Traceback (most recent call last):\n  …\n")
    assert str(carried) == '\n"""\nTraceback (most recent call last):\n  …\n"""'
    assert "\npercore.RemoteTraceback: " in "\n" + "".join(traceback.format_exception(carried))
    there = pickle.loads(pickle.dumps(carried))
    assert type(there) is RemoteTraceback
    assert there.text == carried.text
    assert str(there) == str(carried)
