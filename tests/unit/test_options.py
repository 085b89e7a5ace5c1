"""Every knob: what it is by default, what it refuses, and in which words; and how many CPUs there really are."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percore._common import hardening
from percore._common import options as _options
from percore._common.addresses import InternetAddress
from percore._common.engines import EngineChoice
from percore._common.options import RunnerOptions, usable_cpus
from percore._common.system import default_start_method
from tests.ids import steady

GOOD: dict[str, Any] = {
    "workers": None,
    "lifespan": None,
    "concurrency": 100,
    "threads": None,
    "loop_factory": None,
    "start_method": None,
    "max_message": 2**30,
    "start_timeout": 60.0,
    "kill_after": 5.0,
    "max_tasks_per_worker": None,
    "max_memory_per_worker": None,
    "retries": 0,
    "per_key": None,
    "contextvars": (),
    "thread_initializer": None,
    "max_pending": None,
    "blocked_after": 1.0,
    "listen": (),
    "engine": None,
    "harden": False,
}
BOUNDS = ["max_tasks_per_worker", "per_key", "max_pending"]
NUMBERS = ["workers", "concurrency", "threads", "max_message", "retries", *BOUNDS]
SECONDS = ["start_timeout", "kill_after"]
USER: ContextVar[str] = ContextVar("user")
TRACE: ContextVar[str] = ContextVar("trace")


def options(**knobs: Any) -> RunnerOptions:
    return RunnerOptions.checked(**{**GOOD, **knobs})


def test_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_options, "usable_cpus", lambda: 6)
    given = options()
    assert given.workers == 6
    assert given.threads == 10
    assert given.concurrency == 100
    assert given.max_message == 2**30
    assert (given.start_timeout, given.kill_after) == (60.0, 5.0)
    assert given.start_method == default_start_method()
    assert given.lifespan is None
    assert given.loop_factory is None
    assert (given.retries, given.contextvars, given.thread_initializer) == (0, (), None)
    assert [getattr(given, name) for name in BOUNDS] == [None] * 3


def test_the_default_threads_stay_within_32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_options, "usable_cpus", lambda: 200)
    assert options().threads == 32


def test_what_the_user_gives_is_kept() -> None:
    given = options(
        workers=3,
        lifespan=test_the_defaults,
        concurrency=1,
        threads=7,
        loop_factory=asyncio.new_event_loop,
        start_method="spawn",
        max_message=4096,
        start_timeout=1,
        kill_after=0.5,
        max_tasks_per_worker=10,
        max_memory_per_worker=2**30,
        retries=3,
        per_key=2,
        contextvars=[USER],
        thread_initializer=test_the_defaults,
        max_pending=1000,
        blocked_after=2,
        listen=["127.0.0.1:0"],
        harden=True,
    )
    assert given == RunnerOptions(
        workers=3,
        lifespan=test_the_defaults,  # type: ignore[arg-type]
        concurrency=1,
        threads=7,
        loop_factory=asyncio.new_event_loop,
        start_method="spawn",
        max_message=4096,
        start_timeout=1.0,
        kill_after=0.5,
        max_tasks_per_worker=10,
        max_memory_per_worker=2**30,
        retries=3,
        per_key=2,
        contextvars=(USER,),
        thread_initializer=test_the_defaults,  # type: ignore[arg-type]
        max_pending=1000,
        blocked_after=2.0,
        listen=(InternetAddress(socket.AF_INET, ("127.0.0.1", 0)),),
        harden=True,
    )


def test_hardening_is_a_switch_and_needs_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options().harden is False
    for value in (1, "yes", None):
        with pytest.raises(TypeError, match="harden must be True or False, not"):
            options(harden=value)
    monkeypatch.setattr(hardening, "can_close", lambda: False)
    assert options(harden=False).harden is False
    with pytest.raises(ValueError, match="harden=True needs Linux, and a Python that has ctypes"):
        options(harden=True)


def test_a_system_that_refuses_prctl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardening, "_prctl", lambda: lambda *_: -1)
    with pytest.raises(OSError, match=r"harden=True: the system refuses prctl\(PR_SET_DUMPABLE\), errno \d+"):
        hardening.close_program()
    assert not hardening.Closed.is_program


def test_a_limit_of_memory_is_a_number_of_bytes(subtests: pytest.Subtests) -> None:
    for value in [0.5e9, 512.0 * 2**20, "512M", True, [1]]:
        with (
            subtests.test(steady(value)),
            pytest.raises(TypeError, match=r"must be a whole number of bytes, such as 512 \* 2\*\*20, not"),
        ):
            options(max_memory_per_worker=value)
    for value in [0, -1, 512, 2**24 - 1]:
        with (
            subtests.test(steady(value)),
            pytest.raises(ValueError, match=f"must be at least 16777216 bytes, not {value}: a worker"),
        ):
            options(max_memory_per_worker=value)
    assert options(max_memory_per_worker=2**24).max_memory_per_worker == 2**24


def test_a_count_is_a_whole_number(subtests: pytest.Subtests) -> None:
    for value in [1.5, "4", True, [1], b"1", object()]:
        for name in NUMBERS:
            with subtests.test(name=name, value=value), pytest.raises(TypeError, match=f"^{name} must be a whole number, not "):
                options(**{name: value})


@pytest.mark.parametrize("name", ["concurrency", "max_message", "retries", *SECONDS])
def test_none_is_no_default_where_there_is_a_number(name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name} must be a "):
        options(**{name: None})


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("workers", 1, 1024), ("concurrency", 1, 10**6), ("threads", 1, 10_000), ("max_message", 1024, 2**36), ("retries", 0, 10**6)],
)
def test_a_count_has_bounds(name: str, least: int, most: int) -> None:
    for value in (least, most):
        assert getattr(options(**{name: value}), name) == value
    for value in (least - 1, most + 1, -1, -(10**30), 10**30):
        with pytest.raises(ValueError, match=f"^{name} must be from {least} to {most}, not {value}$"):
            options(**{name: value})


@pytest.mark.parametrize("name", BOUNDS)
def test_a_bound_is_at_least_one(name: str) -> None:
    for value in (1, 2, 10**30):
        assert getattr(options(**{name: value}), name) == value
    for value in (0, -1, -(10**30)):
        with pytest.raises(ValueError, match=f"^{name} must be at least 1, not {value}$"):
            options(**{name: value})


def test_seconds_are_a_number(subtests: pytest.Subtests) -> None:
    for value in ["1", True, [1], object(), 1j]:
        for name in SECONDS:
            with (
                subtests.test(name=name, value=value),
                pytest.raises(TypeError, match=f"^{name} must be a number of seconds, not "),
            ):
                options(**{name: value})


def test_seconds_are_positive_and_finite(subtests: pytest.Subtests) -> None:
    for value in [0, 0.0, -1, -0.1, float("inf"), float("-inf"), float("nan"), 10**400, -(10**400)]:
        for name in SECONDS:
            with (
                subtests.test(name=name, value=value),
                pytest.raises(ValueError, match=f"^{name} must be a positive number of seconds, not "),
            ):
                options(**{name: value})


@given(name=st.sampled_from(SECONDS), value=st.floats(min_value=0, exclude_min=True, allow_infinity=False))
def test_any_positive_number_of_seconds(name: str, value: float) -> None:
    assert getattr(options(**{name: value}), name) == value


def test_what_is_called_must_be_callable(subtests: pytest.Subtests) -> None:
    for value in [1, "name", [], object()]:
        for name, example in [
            ("lifespan", "open_session"),
            ("loop_factory", "asyncio.new_event_loop"),
            ("thread_initializer", "open_connection"),
        ]:
            with (
                subtests.test(name=name, example=example, value=value),
                pytest.raises(TypeError, match=rf"^{name} must be callable, such as {name}={example}, not "),
            ):
                options(**{name: value})


@pytest.mark.parametrize("name", ["loop_factory", "thread_initializer"])
def test_what_is_called_and_not_awaited_must_be_plain(name: str) -> None:
    async def asynchronous() -> None:
        pass

    with pytest.raises(TypeError, match=f"^{name} must be a plain function, not an async one: percore calls it and does not await"):
        options(**{name: asynchronous})


@pytest.mark.parametrize("value", ["thread", "", "SPAWN", 1, [], b"spawn"], ids=steady)
def test_an_unknown_start_method(value: object) -> None:
    with pytest.raises(ValueError, match=r'^start_method must be "forkserver" or "spawn", not ') as caught:
        options(start_method=value)
    assert repr(value) in str(caught.value)


def test_fork_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"^start_method .*Forking a process that runs an event loop is not safe"):
        options(start_method="fork")


@pytest.mark.parametrize("lacking", ["HAS_PIDFD", "HAS_SETSIG"])
def test_the_fork_server_needs_its_system(monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    for name in ("HAS_PIDFD", "HAS_SETSIG"):
        monkeypatch.setattr(_options, name, name != lacking)
    with pytest.raises(ValueError, match=r'^start_method="forkserver" needs .* use start_method="spawn"$'):
        options(start_method="forkserver")
    assert options(start_method="spawn").start_method == "spawn"


# Engines


class Choice(EngineChoice):
    def _check(self, given: dict[str, Any]) -> None:
        if given["listen"]:
            raise ValueError("this engine cannot listen")


def test_an_engine_is_a_name_or_an_object() -> None:
    choice = Choice()
    assert options(engine=choice).engine is choice
    assert [options(engine=value).engine for value in (None, "processes")] == [None, None]
    with pytest.raises(ValueError, match="this engine cannot listen"):
        options(engine=choice, listen=["127.0.0.1:0"])


def test_what_is_no_engine(subtests: pytest.Subtests) -> None:
    for name in ["process", "", "ray"]:
        with subtests.test(name), pytest.raises(ValueError, match=f'^engine must be "processes".* not {name!r}$'):
            options(engine=name)
    for value in [1, b"processes", object(), object]:
        with subtests.test(steady(value)), pytest.raises(TypeError, match=r'^engine must be "processes".* not '):
            options(engine=value)
    with pytest.raises(TypeError, match=r"^give an object: engine=percore.Choice\(\), not engine=percore.Choice$"):
        options(engine=Choice)


def test_an_engine_knows_whether_the_number_of_workers_is_its_own() -> None:
    assert options().is_counted
    assert not options(workers=2).is_counted


# Context variables


@pytest.mark.parametrize(
    "given_as", [list, tuple, iter, lambda variables: dict.fromkeys(variables)], ids=["list", "tuple", "iter", "dict"]
)
def test_context_variables_may_come_in_anything(given_as: Any) -> None:
    assert options(contextvars=given_as([USER, TRACE])).contextvars == (USER, TRACE)


def test_one_context_variable_alone_is_told_what_is_right() -> None:
    with pytest.raises(TypeError, match=r"^contextvars must be a list, such as contextvars=\[user\], not one ContextVar$"):
        options(contextvars=USER)


@pytest.mark.parametrize("value", [7, None, ["user"], "user", [USER, None]], ids=steady)
def test_context_variables_are_context_variables(value: object) -> None:
    with pytest.raises(TypeError, match=r"^contextvars must be ContextVars, not "):
        options(contextvars=value)


# CPUs


class Cgroups:
    """A fake of what a system tells about its CPUs."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def write(self, path: str, text: str | bytes) -> None:
        file = self.path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode() if isinstance(text, str) else text)


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cgroups:
    cgroups = Cgroups(tmp_path)
    real = _options.text_of
    monkeypatch.setattr(_options, "text_of", lambda path: real(str(cgroups.path(path))))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)
    return cgroups


def test_affinity_alone(system: Cgroups) -> None:
    assert usable_cpus() == 8


def test_without_affinity_it_is_the_count_of_cpus(system: Cgroups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert usable_cpus() == 5
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cpus() == 1


@pytest.mark.parametrize(
    ("quota", "cpus"),
    [
        ("max 100000", 8),
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("5000 100000", 1),
        ("1600000 100000", 8),
        ("50000 50000", 1),
        ("garbage", 8),
        ("", 8),
        ("100000 0", 8),
        ("a b", 8),
    ],
)
def test_cgroup_2(system: Cgroups, quota: str, cpus: int) -> None:
    system.write("/proc/self/cgroup", "0::/user/app\n")
    system.write("/sys/fs/cgroup/user/app/cpu.max", quota + "\n")
    assert usable_cpus() == cpus


@pytest.mark.parametrize("tight", ["", "/user", "/user/app"])
def test_the_tightest_of_a_cgroup_and_its_ancestors(system: Cgroups, tight: str) -> None:
    system.write("/proc/self/cgroup", "0::/user/app\n")
    for folder in ("", "/user", "/user/app"):
        system.write(f"/sys/fs/cgroup{folder}/cpu.max", "300000 100000" if folder == tight else "600000 100000")
    assert usable_cpus() == 3


@pytest.mark.parametrize("path", ["/docker/0123456789ab", "/../../elsewhere", "/"])
def test_a_container_sees_its_own_root(system: Cgroups, path: str) -> None:
    system.write("/proc/self/cgroup", f"0::{path}\n")
    system.write("/sys/fs/cgroup/cpu.max", "400000 100000")
    assert usable_cpus() == 4


@pytest.mark.parametrize(
    ("quota", "period", "cpus"),
    [("-1", "100000", 8), ("300000", "100000", 3), ("250000", "100000", 3), ("1000", "0", 8), ("", "", 8)],
)
@pytest.mark.parametrize("controllers", ["cpu", "cpu,cpuacct", "cpuacct,cpu"])
def test_cgroup_1(system: Cgroups, controllers: str, quota: str, period: str, cpus: int) -> None:
    system.write("/proc/self/cgroup", f"12:memory:/app\n4:{controllers}:/app\n1:name=systemd:/app\n0::/app\n")
    system.write("/sys/fs/cgroup/cpu/app/cpu.cfs_quota_us", quota)
    system.write("/sys/fs/cgroup/cpu/app/cpu.cfs_period_us", period)
    assert usable_cpus() == cpus


def test_other_controllers_do_not_count(system: Cgroups) -> None:
    system.write("/proc/self/cgroup", "5:cpuset:/app\n6:cpuacct:/app\n")
    system.write("/sys/fs/cgroup/cpu/app/cpu.cfs_quota_us", "100000")
    system.write("/sys/fs/cgroup/cpu/app/cpu.cfs_period_us", "100000")
    assert usable_cpus() == 8


def test_a_cgroup_may_have_any_name(system: Cgroups) -> None:
    system.write("/proc/self/cgroup", b"0::/caf\xe9:with:colons\n")
    system.write("/sys/fs/cgroup/cpu.max", "200000 100000")
    assert usable_cpus() == 2


def test_the_real_system_has_at_least_one() -> None:
    assert 1 <= usable_cpus() <= (os.cpu_count() or 1)


def test_a_lifespan_that_was_called_already() -> None:
    @contextlib.asynccontextmanager
    async def resource() -> AsyncIterator[None]:
        yield

    @contextlib.contextmanager
    def plain() -> Iterator[None]:
        yield

    for manager in (resource(), plain()):
        with pytest.raises(TypeError, match=r"lifespan=open_session, not lifespan=open_session\(\)"):
            options(lifespan=manager)
