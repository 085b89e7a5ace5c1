"""python -m tests.soak: constant work for hours, and whether anything grows. The exit status is 1 if something does.

    SOAK_MINUTES=120     how long (default 120); the first sixth is the warm-up
    SOAK_ENGINE=threads  workers that are threads of the program (default: processes)
    SOAK_RATE=80         calls in a second on each of its two runners: about half a CPU
    SOAK_SEED=7          which calls and which deaths (default: a new one, which is printed)

The samples are lines of JSON in build/soak. `python -m tests.soak FILE` judges them once more, also those of a run that goes on.
Ctrl-C ends a run early, and judges what there is.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any, Final

from percore._attach import programs
from tests.soak.samples import Sample, cpu_seconds, figures, judged, roles, table

KEPT: Final = Path("build/soak")
WARM_UP: Final = 1 / 6
ALLOCATOR: Final = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
}
"""glibc gives large blocks back at once, and keeps no lists of freed ones for each thread. Else it keeps ever more: its heaps of
several threads fill with holes, and each of these lists grows for hours, up to 230 KiB."""
PATIENCE: Final = 300.0
"""Seconds that the program may take to close."""


def main() -> int:
    """Run, or judge a file."""
    if sys.argv[1:]:
        samples = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
        return verdict(samples)
    minutes = float(os.environ.get("SOAK_MINUTES") or 120)
    engine = os.environ.get("SOAK_ENGINE") or "processes"
    seed = os.environ.get("SOAK_SEED") or str(int.from_bytes(os.urandom(3), "big"))
    KEPT.mkdir(parents=True, exist_ok=True)
    path = KEPT / f"{engine}-{time.strftime('%m%d-%H%M%S')}.jsonl"
    tell(f"soak: {minutes:g} minutes over {engine}, SOAK_SEED={seed}, samples in {path}")
    with tempfile.TemporaryDirectory(prefix="percore-soak-") as folder, path.open("w") as file:
        samples, status = soak([engine, seed, folder], minutes, file)
    if status:
        tell(f"! the program has ended with status {status}")
    return verdict(samples) or bool(status)


def soak(arguments: list[str], minutes: float, file: IO[str]) -> tuple[list[Sample], int]:
    """Run the program for so long. Return its samples and its exit status."""
    command = [sys.executable, "-m", "tests.soak.program", *arguments]
    # In a group of its own, so that Ctrl-C does not end it in the middle of a round.
    program = subprocess.Popen(
        command, env=os.environ | ALLOCATOR, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
    )
    assert program.stdin is not None
    assert program.stdout is not None
    samples: list[Sample] = []
    is_over: list[int] = []
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda signum, _: is_over.append(signum))
    began = time.monotonic()
    for line in program.stdout:  # its workers write to it as well
        if not line.startswith("quiet "):
            continue
        samples.append(sample(program.pid, json.loads(line.removeprefix("quiet ")), time.monotonic() - began))
        file.write(json.dumps(samples[-1]) + "\n")
        file.flush()
        if is_over or samples[-1]["seconds"] > minutes * 60:
            break
        with contextlib.suppress(BrokenPipeError):  # it has died; its output ends as well
            program.stdin.write("go\n")
            program.stdin.flush()
    with contextlib.suppress(BrokenPipeError):
        program.stdin.close()
    try:
        return samples, program.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(program.pid, signal.SIGKILL)
        return samples, program.wait()


def sample(pid: int, told: dict[str, Any], seconds: float) -> Sample:
    """Read all processes while the program waits."""
    processes = {}
    for one, role in roles(pid, told).items():
        if (read := figures(one)) is not None:
            processes[str(one)] = {"role": role, **read}
    for worker, count in told.pop("objects of workers").items():
        if worker in processes:
            processes[worker]["objects"] = count
    return {"seconds": seconds, "cpu": cpu_seconds(pid), "pages": len(programs.read(pid)), "processes": processes, **told}


def verdict(samples: list[Sample]) -> int:
    """Print the table. Return 1 if something grows, or nothing could be judged."""
    if not samples:
        tell("! no quiet point was reached")
        return 1
    last = samples[-1]
    rows = judged(samples, last["seconds"] * WARM_UP)
    changes = ", ".join(f"{count} {name}" for name, count in last["changes"].items())
    tell(f"{last['seconds'] / 60:.0f} minutes, {len(samples)} quiet points, {last['calls']} calls; {changes}")
    tell(f"records of workers: {last['records']}; CPU: {last['cpu'] / last['seconds']:.2f} of one")
    tell("\n".join(table(rows)))
    growing = [row for row in rows if row.verdict.grows]
    for row in growing:
        tell(f"! {row.measure} of the {row.role} grows")
    return int(bool(growing) or all(row.verdict.grows is None for row in rows))


def tell(line: str) -> None:
    """At once: it takes hours."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
