"""What processes use: the table, and readings of this process and of some that have ended."""

import asyncio
import os
import subprocess
import sys
import threading
from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from percore import ProcessUsage, Usage
from percore._monitor.usage import UsageMeter

MIB = 2**20
OWN = {os.getpid(): "supervisor"}
Times = namedtuple("Times", "user system")


def used(cpu: float = 0.0, uss: int | None = MIB, pid: int = 7, role: str = "worker 0") -> ProcessUsage:
    return ProcessUsage(pid=pid, role=role, rss=2 * MIB, uss=uss, cpu=cpu, threads=3)


class TestTable:
    def test_has_a_line_for_each_process_and_the_totals(self) -> None:
        usage = Usage(
            (
                ProcessUsage(pid=812, role="supervisor", rss=45 * MIB, uss=30 * MIB + MIB // 2, cpu=12.34, threads=2),
                ProcessUsage(pid=90_817, role="fork server", rss=9 * MIB, uss=MIB, cpu=0.0, threads=1),
                ProcessUsage(pid=90_818, role="worker 0", rss=1024 * MIB, uss=1000 * MIB, cpu=187.26, threads=34),
            )
        )
        assert str(usage).splitlines() == [
            "  PID  process             RES         USS   %CPU  threads",
            "  812  supervisor     45.0 MiB    30.5 MiB   12.3        2",
            "90817  fork server     9.0 MiB     1.0 MiB    0.0        1",
            "90818  worker 0     1024.0 MiB  1000.0 MiB  187.3       34",
            "       total        1078.0 MiB  1031.5 MiB  199.6       37",
        ]

    def test_says_what_the_system_does_not_tell(self) -> None:
        assert str(Usage((used(uss=None), used(pid=8, role="worker 1")))).splitlines() == [
            "PID  process       RES      USS  %CPU  threads",
            "  7  worker 0  2.0 MiB        -   0.0        3",
            "  8  worker 1  2.0 MiB  1.0 MiB   0.0        3",
            "     total     4.0 MiB        -   0.0        6",
        ]

    def test_of_nothing(self) -> None:
        assert str(Usage(())).splitlines() == [
            "PID  process      RES      USS  %CPU  threads",
            "     total    0.0 MiB  0.0 MiB   0.0        0",
        ]


class TestReading:
    async def test_tells_of_this_process(self) -> None:
        (one,) = (await UsageMeter().read(OWN)).processes
        assert (one.pid, one.role) == (os.getpid(), "supervisor")
        assert one.uss is not None
        assert MIB < one.uss <= one.rss
        assert one.threads >= 1
        assert 0 < one.cpu <= 100 * (os.cpu_count() or 1)

    async def test_keeps_the_order_it_was_given(self) -> None:
        roles = {os.getppid(): "worker 0", os.getpid(): "worker 1"}
        usage = await UsageMeter().read(roles)
        assert [(one.pid, one.role) for one in usage.processes] == list(roles.items())

    def test_leaves_out_who_has_ended(self) -> None:
        child = subprocess.Popen([sys.executable, "-c", ""])
        roles = {child.pid: "worker 0", **OWN}
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its pid is still taken
        meter = UsageMeter()
        assert [one.role for one in asyncio.run(meter.read(roles)).processes] == ["supervisor"]
        child.wait()
        assert [one.role for one in asyncio.run(meter.read(roles)).processes] == ["supervisor"]

    @pytest.mark.parametrize("error", [psutil.NoSuchProcess, psutil.AccessDenied])
    async def test_leaves_out_who_ends_meanwhile_or_may_not_be_looked_at(
        self, monkeypatch: pytest.MonkeyPatch, error: type[psutil.Error]
    ) -> None:
        def gone(process: psutil.Process) -> int:
            raise error(process.pid)

        monkeypatch.setattr(psutil.Process, "num_threads", gone)
        assert await UsageMeter().read(OWN) == Usage(())

    @pytest.mark.parametrize("name", ["memory_full_info", "memory_footprint"])
    async def test_takes_uss_by_the_name_of_every_psutil(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.setattr(psutil.Process, name, lambda _process: SimpleNamespace(uss=4321), raising=False)
        (one,) = (await UsageMeter().read(OWN)).processes
        assert one.uss == 4321

    @pytest.mark.parametrize("is_refused", [False, True])
    async def test_does_without_uss(self, monkeypatch: pytest.MonkeyPatch, is_refused: bool) -> None:
        def read(process: psutil.Process) -> Any:
            if is_refused:
                raise psutil.AccessDenied(process.pid)
            return SimpleNamespace(rss=1)

        for name in ("memory_full_info", "memory_footprint"):
            monkeypatch.setattr(psutil.Process, name, read, raising=False)
        (one,) = (await UsageMeter().read(OWN)).processes
        assert one.uss is None
        assert one.rss > 0

    async def test_a_cancelled_one_ends_by_itself(self, monkeypatch: pytest.MonkeyPatch) -> None:
        began, may_end, ended = asyncio.Event(), threading.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        count = psutil.Process.num_threads

        def wait(process: psutil.Process) -> int:
            loop.call_soon_threadsafe(began.set)
            may_end.wait()
            loop.call_soon_threadsafe(ended.set)
            return count(process)

        monkeypatch.setattr(psutil.Process, "num_threads", wait)
        meter = UsageMeter()
        reading = asyncio.create_task(meter.read(OWN))
        await began.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        may_end.set()
        await ended.wait()
        assert len((await meter.read(OWN)).processes) == 1


class TestCpu:
    """The system's figures are given; three clocks are told: CPU time, since when, and the wall clock of a start."""

    @pytest.fixture
    def system(self, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        system = SimpleNamespace(cpu=0.0, monotonic=1000.0, wall=50_000.0, started=50_000.0)
        monkeypatch.setattr(psutil.Process, "cpu_times", lambda _process: Times(system.cpu * 0.75, system.cpu * 0.25))
        monkeypatch.setattr(psutil.Process, "create_time", lambda _process: system.started)
        clocks = SimpleNamespace(monotonic=lambda: system.monotonic, time=lambda: system.wall)
        monkeypatch.setattr("percore._monitor.usage.time", clocks)
        monkeypatch.setattr("percore._monitor.usage.os", SimpleNamespace(cpu_count=lambda: 4))
        monkeypatch.setattr("percore._monitor.usage.uss_of", lambda _process: None)  # to read it takes longest of all
        return system

    async def read(self, meter: UsageMeter) -> float:
        (one,) = (await meter.read(OWN)).processes
        return one.cpu

    async def test_is_since_its_start_and_then_since_the_previous_reading(self, system: SimpleNamespace) -> None:
        meter = UsageMeter()
        system.cpu, system.wall = 2.0, system.wall + 8
        assert await self.read(meter) == pytest.approx(25)
        system.cpu, system.monotonic = 5.0, 1002.0
        assert await self.read(meter) == pytest.approx(150)
        system.monotonic = 1003.0
        assert await self.read(meter) == 0
        system.cpu, system.monotonic = 5.5, 1004.0
        assert await self.read(meter) == pytest.approx(50)

    async def test_a_second_one_in_a_row_tells_what_the_first_did(self, system: SimpleNamespace) -> None:
        """A step of the count, 10 ms, that falls between two readings 2 ms apart is no load of 500 %."""
        meter = UsageMeter()
        system.cpu, system.wall = 2.0, system.wall + 100
        assert await self.read(meter) == pytest.approx(2)
        for _ in range(3):
            system.cpu, system.monotonic, system.wall = system.cpu + 0.01, system.monotonic + 0.002, system.wall + 0.002
            assert await self.read(meter) == pytest.approx(2, abs=0.1)
        system.monotonic = 1001.0  # a second after the first one, which is old enough now
        assert await self.read(meter) == pytest.approx(3)

    async def test_readings_that_follow_closely_span_a_second_and_no_more_than_two(self, system: SimpleNamespace) -> None:
        meter = UsageMeter()
        system.cpu, system.wall = 60.0, system.wall + 100
        await self.read(meter)
        for step in range(1, 60):
            system.monotonic = 1000 + step / 10
            if step >= 20:  # idle until here, and after the first second compared with readings of that time
                system.cpu += 0.05
            read = await self.read(meter)
            if 11 <= step < 20:
                assert read == 0
            if step >= 40:
                assert read == pytest.approx(50, abs=3)

    async def test_a_clock_that_was_set_matters_only_the_first_time(self, system: SimpleNamespace) -> None:
        meter = UsageMeter()
        system.cpu, system.wall = 1.0, system.wall + 10
        await self.read(meter)
        system.cpu, system.monotonic, system.wall = 2.0, 1002.0, 7.0
        assert await self.read(meter) == pytest.approx(50)

    @pytest.mark.parametrize("age", [-5, 0, 0.001])
    async def test_is_never_more_than_all_cpus(self, system: SimpleNamespace, age: float) -> None:
        meter = UsageMeter()
        system.cpu, system.wall = 3.0, system.wall + age
        assert await self.read(meter) == pytest.approx(400)
        system.cpu += 0.01  # in no time at all
        assert await self.read(meter) == pytest.approx(400)

    async def test_of_nothing_in_no_time(self, system: SimpleNamespace) -> None:
        assert await self.read(UsageMeter()) == 0

    async def test_each_meter_has_its_own_previous_reading(self, system: SimpleNamespace) -> None:
        one, other = UsageMeter(), UsageMeter()
        system.cpu, system.wall = 4.0, system.wall + 8
        await self.read(one)
        system.cpu, system.monotonic, system.wall = 5.0, 1008.0, system.wall + 8
        assert await self.read(one) == pytest.approx(12.5)
        assert await self.read(other) == pytest.approx(31.25)
