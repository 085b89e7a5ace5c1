"""What is read of a process, and the series that the samples of a run make.

A sample is what the program has told at a quiet point, and the figures of each of its processes by role. Roles:

    program            it lives as long as the run
    fork server        another one after each reload
    lasting worker     it is never replaced
    passing worker     it is recycled, killed, drained and reloaded
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from tests.soak.judge import Points, Verdict, judge_count, judge_size

Sample: TypeAlias = dict[str, Any]

KIB: Final = 1024
COUNTS: Final = ("descriptors", "threads", "maps", "tasks", "timers", "watched", "slots")
BOUNDS: Final = {"heap": 256 * KIB, "resident": 1024 * KIB, "objects": 100.0, "blocks": 500.0}
"""How much a size may grow in an hour."""
IN_PROCESS: Final = ("descriptors", "threads", "maps", "heap", "resident")
TOLD: Final = ("tasks", "timers", "watched", "slots", "objects", "blocks")
YOUNG: Final = 6
"""Quiet points after which a fork server or a worker that lasts has allocated what it needs."""
OLDEST: Final = 3
"""Ages of workers that pass, in quiet points, at which they are compared."""


def figures(pid: int) -> dict[str, float] | None:
    """Read the figures of a process; None if it is gone.

    `heap` is memory that belongs to this process alone and to no file: in kernel words, `Anonymous`. `resident` is that, and the
    pages of files. Pages of shared memory do not count: slots that nobody uses keep theirs, up to the size of the memory, and rare
    large payloads fill them for hours. Shared memory that is lost shows as slots, as mappings or as descriptors. `maps` are
    mappings of files and of shared memory.
    """
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        heap = next(int(line.split()[1]) for line in rollup if line.startswith("Anonymous:"))
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        maps = sum("/" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
        descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        started = int(_stat(pid)[19])
        resident = sum(int(status[name].split()[0]) for name in ("RssAnon", "RssFile"))
    except (OSError, StopIteration, KeyError):  # a process that has ended has no sizes
        return None
    return {
        "descriptors": descriptors,
        "threads": int(status["Threads"]),
        "maps": maps,
        "heap": heap * KIB,
        "resident": resident * KIB,
        "started": started,
    }


def children(pid: int) -> list[int]:
    """The processes whose parent it is, whichever of its threads has started them."""
    found = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (thread / "children").read_text().split()]
    return found


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of its children that were reaped."""
    try:
        return sum(map(int, _stat(pid)[11:15])) / 100
    except OSError:
        return 0.0


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat, from the third on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def roles(program: int, told: dict[str, Any]) -> dict[int, str]:
    """The roles of all processes of the program, by process id."""
    found = {program: "program"}
    workers = {int(pid): role for pid, role in told["workers"].items()}
    for pid in children(program):
        found[pid] = workers.get(pid, "fork server")
    for server in [pid for pid, role in found.items() if role == "fork server"]:
        found |= {pid: workers[pid] for pid in children(server) if pid in workers}
    return found


class Row(NamedTuple):
    """A series and what is judged of it."""

    role: str
    measure: str
    how: str
    verdict: Verdict


def judged(samples: Sequence[Sample], warm_up: float) -> list[Row]:
    """Judge all series of a run, whose first `warm_up` seconds do not count."""
    rows = []
    late = [sample for sample in samples if sample["seconds"] >= warm_up]
    for measure in TOLD:
        points = [(sample["seconds"] / 3600, sample[measure]) for sample in late if measure in sample]
        rows.append(_row("program", measure, "over the run", [points]))
    rows += [_row("program", measure, "over the run", _lives(late, "program", measure, 0)) for measure in IN_PROCESS]
    for role in ("fork server", "lasting worker"):
        lives = {measure: _lives(samples, role, measure, YOUNG, warm_up) for measure in (*IN_PROCESS, "objects")}
        rows += [_row(role, measure, "over each life", groups) for measure, groups in lives.items()]
    for role in ("fork server", "passing worker"):
        ages = {measure: _ages(samples, role, measure, warm_up) for measure in IN_PROCESS}
        rows += [_row(role, measure, "at equal age", groups) for measure, groups in ages.items()]
    return [row for row in rows if row.verdict.points]


def _row(role: str, measure: str, how: str, groups: Sequence[Points]) -> Row:
    is_count = measure in COUNTS and how != "at equal age"
    bound = BOUNDS.get(measure, 0.0)
    return Row(role, measure, how, judge_count(groups) if is_count else judge_size(groups, bound))


def _read(samples: Iterable[Sample], role: str, measure: str) -> dict[tuple[str, float], list[tuple[float, float]]]:
    """The points of each process of a role, by its id and the time when it was started: ids come again within an hour."""
    found: dict[tuple[str, float], list[tuple[float, float]]] = defaultdict(list)
    for sample in samples:
        for pid, process in sample["processes"].items():
            if process["role"] == role and measure in process:
                found[pid, process["started"]].append((sample["seconds"] / 3600, process[measure]))
    return found


def _lives(samples: Sequence[Sample], role: str, measure: str, young: int, warm_up: float = 0.0) -> list[Points]:
    """A group for each process, without its first points."""
    groups = _read(samples, role, measure).values()
    return [[(hour, value) for hour, value in points[young:] if hour * 3600 >= warm_up] for points in groups]


def _ages(samples: Sequence[Sample], role: str, measure: str, warm_up: float) -> list[Points]:
    """A group for each of the first ages, over all processes that had it."""
    ages: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for points in _read(samples, role, measure).values():
        for age, (hour, value) in enumerate(points[:OLDEST]):
            if hour * 3600 >= warm_up:
                ages[age].append((hour, value))
    return [sorted(points) for points in ages.values()]


def table(rows: Sequence[Row]) -> list[str]:
    """The rows as lines of text."""
    lines = [f"{'':<15}{'':<12}{'':<15}{'points':>7}{'lowest':>11}{'highest':>11}{'first':>11}{'last':>11}  growth in an hour"]
    for row in rows:
        one = row.verdict
        show = _bytes if row.measure in ("heap", "resident") else _number
        numbers = "".join(f"{show(value):>11}" for value in (one.lowest, one.highest, one.first, one.last))
        growth = "" if one.line is None else f"{show(one.line.slope)} ± {show(one.line.error)}"
        end = {True: "GROWS", False: "" if one.line else "constant", None: "too few points"}[one.grows]
        lines.append(f"{row.role:<15}{row.measure:<12}{row.how:<15}{one.points:>7}{numbers}  {growth:<22} {end}".rstrip())
    return lines


def _bytes(value: float) -> str:
    return f"{value / KIB:,.0f} kB"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.1f}"
