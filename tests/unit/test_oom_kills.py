"""Which ends of workers the kernel's counts of its kills for lack of memory explain."""

from pathlib import Path

import pytest

from percore._common import options
from percore._engines.processes import oom_kills
from percore._engines.processes.oom_kills import Counts, OomKills, counts

BY_CGROUP = "killed by the kernel: out of memory"
BY_MACHINE = "probably killed by the kernel: the machine has run out of memory"


class System:
    """The files of a system."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def kills(self, count: int, machine: int | None = None, file: str = "/sys/fs/cgroup/app/memory.events") -> None:
        """Have the system tell of this many kills."""
        self.write(file, f"low 0\nhigh 0\nmax 7\noom {count}\noom_kill {count}\noom_group_kill 0\n")
        if machine is not None:
            self.write("/proc/vmstat", f"nr_free_pages 5\noom_kill {machine}\n")


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> System:
    system = System(tmp_path)
    real = options.text_of
    monkeypatch.setattr(oom_kills, "text_of", lambda path: real(str(tmp_path) + path))
    system.write("/proc/self/cgroup", "0::/app\n")
    return system


def test_a_kill_that_was_counted_in_the_cgroup_explains_one_end(system: System) -> None:
    system.kills(3, machine=8)
    kills, before = OomKills(), counts()
    assert before == Counts("/sys/fs/cgroup/app/memory.events", 3, 8)
    assert kills.explain(before) == ""
    system.kills(4, machine=9)
    assert [kills.explain(before), kills.explain(before)] == [BY_CGROUP, ""]


def test_of_workers_killed_together_each_is_explained_also_if_their_successors_have_started(system: System) -> None:
    system.kills(0)
    kills, first, second = OomKills(), counts(), counts()
    system.kills(2)
    assert kills.explain(first) == BY_CGROUP
    third = counts()
    assert kills.explain(second) == BY_CGROUP
    assert kills.explain(third) == ""
    system.kills(3)
    assert kills.explain(third) == BY_CGROUP


def test_kills_in_other_cgroups_explain_nothing(system: System) -> None:
    system.kills(0, machine=5)
    kills, before = OomKills(), counts()
    system.kills(0, machine=9)
    assert kills.explain(before) == ""


def test_where_only_the_machine_counts_it_is_probable(system: System) -> None:
    system.write("/proc/vmstat", "oom_kill 5\n")
    kills, before = OomKills(), counts()
    assert before == Counts("", 0, 5)
    assert kills.explain(before) == ""
    system.write("/proc/vmstat", "oom_kill 6\n")
    assert [kills.explain(before), kills.explain(before)] == [BY_MACHINE, ""]


def test_in_another_cgroup_than_at_the_start_the_machine_tells(system: System) -> None:
    system.kills(0, machine=5)
    kills, before = OomKills(), counts()
    system.write("/proc/self/cgroup", "0::/other\n")
    system.kills(9, machine=5, file="/sys/fs/cgroup/other/memory.events")
    assert kills.explain(before) == ""
    system.kills(9, machine=6)
    assert kills.explain(before) == BY_MACHINE


@pytest.mark.parametrize("path", ["/docker/0123", "/../../elsewhere", "/"])
def test_a_container_sees_its_own_root(system: System, path: str) -> None:
    system.write("/proc/self/cgroup", f"0::{path}\n")
    system.kills(4, file="/sys/fs/cgroup/memory.events")
    assert counts().cgroup == 4


def test_cgroup_1_comes_first_where_it_has_the_memory(system: System) -> None:
    system.write("/proc/self/cgroup", "9:name=systemd:/\n4:memory:/app\n3:cpu:/\n0::/unified\n")
    system.write("/sys/fs/cgroup/memory/app/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert counts() == Counts("/sys/fs/cgroup/memory/app/memory.oom_control", 2, None)


@pytest.mark.parametrize("text", ["", "garbage", "oom_kill", "oom_kill many", "0::/app\nx:y"])
def test_what_cannot_be_read_explains_nothing(system: System, text: str) -> None:
    for file in ("/proc/self/cgroup", "/proc/vmstat", "/sys/fs/cgroup/app/memory.events"):
        system.write(file, text)
    before = counts()
    assert (before.cgroup, before.machine) == (0, None)
    assert OomKills().explain(before) == ""
