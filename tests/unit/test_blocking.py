"""When a worker that reads nothing is examined, and what is told of it."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest

from percore._engines.processes import examination
from percore._engines.processes.examination import CpuTimes
from percore._runner.loop_watch import held_the_gil
from percore._scheduler.blocking import LoopWatch, Step
from percore._scheduler.lifecycle import State
from percore._supervisor.blocked_loops import BlockedLoops
from percore._worker_process import stacks_file

STOPPED = "its process is stopped"


def blocked(watch: LoopWatch, since: float = 10.0) -> LoopWatch:
    assert watch.look(since + 1, since) is Step.EXAMINE
    assert watch.examined(since + 1.1, since, "")
    return watch


def test_a_worker_that_reads_is_left_alone() -> None:
    watch = LoopWatch(1.0)
    for now, since in [(5.0, 0.0), (6.0, 5.5), (7.0, 6.5), (7.4, 6.5), (8.0, 0.0)]:
        assert watch.look(now, since) is Step.NOTHING
    assert not watch.is_told
    assert watch.blocked_since is None


def test_a_block_is_told_once_and_so_is_its_end() -> None:
    watch = blocked(LoopWatch(1.0))
    assert watch.blocked_since == 10.0
    assert watch.look(50.0, 10.0) is Step.NOTHING
    assert watch.silence(50.0) == 40.0
    assert watch.look(51.0, 0.0) is Step.TELL_END
    assert watch.look(52.0, 0.0) is Step.NOTHING
    assert not watch.is_told
    assert watch.look(54.0, 53.0) is Step.EXAMINE


def test_who_reads_a_part_and_blocks_again_has_gone_on() -> None:
    watch = blocked(LoopWatch(1.0))
    assert watch.look(20.0, 19.5) is Step.TELL_END
    assert watch.look(20.6, 19.5) is Step.EXAMINE


def test_nothing_is_told_of_a_worker_that_reads_during_its_examination() -> None:
    for since in (0.0, 11.05):
        watch = LoopWatch(1.0)
        assert watch.look(11.0, 10.0) is Step.EXAMINE
        assert watch.look(11.05, 10.0) is Step.NOTHING
        assert not watch.examined(11.1, since, "")
        assert watch.look(11.2, since) is Step.NOTHING
        assert watch.blocked_since is None
    watch = LoopWatch(1.0)
    assert watch.look(11.0, 10.0) is Step.EXAMINE
    assert watch.look(11.05, 0.0) is Step.NOTHING  # it reads, and then nothing again, at the same moment of the clock
    assert not watch.examined(11.1, 10.0, "")


def test_a_worker_that_does_not_run_is_examined_again() -> None:
    watch = LoopWatch(1.0)
    assert watch.look(11.0, 10.0) is Step.EXAMINE
    assert watch.examined(11.1, 10.0, f"{STOPPED} (1 %)")
    assert watch.blocked_since is None
    assert watch.look(12.0, 10.0) is Step.NOTHING
    assert watch.look(12.2, 10.0) is Step.EXAMINE
    assert not watch.examined(12.3, 10.0, f"{STOPPED} (2 %)")  # no news
    assert watch.look(13.4, 10.0) is Step.EXAMINE
    assert watch.examined(13.5, 10.0, "")
    assert watch.look(20.0, 0.0) is Step.TELL_END


@pytest.mark.parametrize(
    ("before", "now", "obstacle"),
    [
        (CpuTimes(0, 0), CpuTimes(0, 0), ""),
        (CpuTimes(5, 5), CpuTimes(5 + 70_000_000, 5 + 70_000_000), ""),  # a loaded machine is no reason to be silent
        (CpuTimes(5, 5), CpuTimes(5 + 90_000_000, 5), "too little CPU time (it waited for a CPU for 90% of the time)"),
        (CpuTimes(5, 5), CpuTimes(5, 5 + 150_000_000), "used up its CPU quota (it was throttled for 100% of the time)"),
    ],
    ids=["idle", "loaded", "starved", "throttled"],
)
def test_a_process_without_cpu(before: CpuTimes, now: CpuTimes, obstacle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/7/stat": "7 (a) b) R 1 7 7",
        "/proc/7/task/7/schedstat": f"123 {now.waited} 17\n",
        "/proc/7/cgroup": "4:memory:/some\n0::/jobs/seven\n",
        "/sys/fs/cgroup/jobs/seven/cpu.stat": f"usage_usec 5\nthrottled_usec {now.throttled // 1000}\n",
    }
    monkeypatch.setattr(examination, "_text", lambda path: files.get(path, ""))
    found = examination._obstacle(7, before, 0.1)
    assert obstacle in found
    assert bool(found) == bool(obstacle)


def test_the_quota_of_any_ancestor_throttles(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    throttled = {"usage_usec": 7, "nr_throttled": 4, "throttled_usec": 90_000}
    none = {"usage_usec": 9, "throttled_usec": 0}
    second = "0::/jobs/seven"
    cases: dict[str, tuple[str, dict[str, dict[str, int]]]] = {
        "its own": (second, {"": {"usage_usec": 9}, "/jobs": none, "/jobs/seven": throttled}),
        "of its parent": (second, {"": {"usage_usec": 9}, "/jobs": throttled, "/jobs/seven": none}),
        "of its parent, and its own cgroup has no controller": (second, {"/jobs": throttled, "/jobs/seven": {"usage_usec": 9}}),
        "of the only cgroup of a container, with the host's path": (second, {"": throttled}),
        "in a cgroup namespace": ("0::/", {"": throttled}),
        "version 1": (
            "5:cpuset:/a\n4:cpuacct,cpu:/jobs/seven\n0::/b",
            {"/cpu/jobs": {"nr_throttled": 4, "throttled_time": 90_000_000}},
        ),
    }
    for case, (cgroups, folders) in cases.items():
        with subtests.test(case):
            files = {f"/sys/fs/cgroup{folder}/cpu.stat": fields for folder, fields in folders.items()}
            texts = {name: "".join(f"{field} {number}\n" for field, number in fields.items()) for name, fields in files.items()}
            texts["/proc/7/cgroup"] = f"{cgroups}\n"
            monkeypatch.setattr(examination, "_text", lambda path, texts=texts: texts.get(path, ""))
            assert examination._cpu_times(7) == CpuTimes(0, 90_000_000)


def test_the_state_of_a_process() -> None:
    assert examination.state_of("7 (a) T b) T 1 7 7") == "T"
    assert examination.state_of("") == ""


def test_stacks_without_percore() -> None:
    own = "\n".join(f'  File "{examination._PACKAGE}{name}.py", line 3 in run' for name in ("_worker/server", "_worker/main"))
    user = 'Thread 0x1 (most recent call first):\n  File "/a/job.py", line 3 in wait\n  File "/usr/re.py", line 5 in sub'
    idle = f"Thread 0x2 (most recent call first):\n{own}"
    assert examination.without_own(f"{user}\n{own}\n\n{idle}\n\n{user}\n{own}\n") == f"{user}\n\n{user}"
    assert examination.without_own(f"{idle}\n\n{idle}\n") == f"{idle}\n\n{idle}"
    assert examination.without_own("") == ""


LOOP = """Current thread 0x2 (most recent call first):
  File "/usr/re.py", line 5 in sub
  File "/a/job.py", line 3 in parse
  File "/usr/lib/python3.11/asyncio/events.py", line 80 in _run
  File "{package}_worker/server.py", line 3 in _run"""
THREAD = """Thread 0x1 (most recent call first):
  File "/a/job.py", line 9 in hash_all"""
IDLE = """Current thread 0x2 (most recent call first):
  File "{package}_worker/server.py", line 3 in _run"""


@pytest.mark.parametrize(
    ("call", "parts", "expected"),
    [
        (7, (THREAD, LOOP), (7, "parse")),
        (None, (THREAD, LOOP), (None, "parse")),
        (None, (THREAD, IDLE), (None, "")),  # it has answered: no thread holds the GIL
        ("stuck", (THREAD, LOOP), (None, "parse")),
        ("stuck", (THREAD, IDLE), (None, "hash_all")),
        ("stuck", (THREAD, THREAD, IDLE), (None, "")),
        ("stuck", (IDLE,), (None, "")),
    ],
)
def test_who_blocks(call: object, parts: tuple[str, ...], expected: tuple[int | None, str]) -> None:
    stacks = "\n\n".join(parts).replace("{package}", examination._PACKAGE)
    text = stacks if call == "stuck" else stacks_file.with_call(call, stacks)  # type: ignore[arg-type]
    found = examination.told_by(text, "")
    assert (found.call, found.frame) == expected
    assert "job.py" in found.stacks or parts == (IDLE,)
    assert "Call" not in found.stacks


def test_who_has_blocked_all_threads() -> None:
    assert held_the_gil(3.0, 2.9, 1.0)
    assert not held_the_gil(3.0, 0.1, 1.0)  # the process did not run
    assert not held_the_gil(0.9, 0.9, 1.0)


class Clock:
    """The loop, as the watch sees it. `timers`: what it has been asked to call later, and was not told to forget."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []

    def time(self) -> float:
        return 0.0

    def call_later(self, _seconds: float, callback: Callable[[], None]) -> "Timer":
        self.timers.append(Timer(self, callback))
        return self.timers[-1]


class Timer:
    def __init__(self, clock: Clock, callback: Callable[[], None]) -> None:
        self._clock, self.callback = clock, callback

    def when(self) -> float:
        return 0.0

    def cancel(self) -> None:
        self._clock.timers.remove(self)


@pytest.mark.parametrize("raises", [False, True])
def test_a_log_handler_that_submits_or_raises_leaves_one_timer(raises: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its call arms the watch, in the middle of a look."""
    clock: Any = Clock()
    member: Any = Mock(calls={1: None}, life=Mock(state=State.READY))
    loops = BlockedLoops(clock, [member], 1.0)

    def step(_member: Any, _now: float) -> None:
        if raises:
            raise KeyboardInterrupt
        loops.arm()

    monkeypatch.setattr(loops, "_step", step)
    loops.arm()
    for _ in range(3):
        (timer,) = clock.timers
        clock.timers.clear()
        with pytest.raises(KeyboardInterrupt) if raises else nullcontext():
            timer.callback()
    assert len(clock.timers) == 1
    assert loops.is_armed
