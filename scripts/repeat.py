"""Repeats tests while the machine has four times the work it can do: python scripts/repeat.py [OPTIONS] [-- PYTEST_ARGUMENT ...]

    --times 50       how often each test is run
    --minutes 30     after so long no other run begins
    --load 4         how many runs at once, for each CPU

A test that passes on an idle machine says little about a race. The load of each run is the other runs. Without arguments for
pytest these are the tests with the most races. It prints a line for each run and, at the end or at Ctrl-C, how often each test
failed. The outputs of failed runs are kept in build/repeat. The exit status is 1 if a test failed, or none was run.
"""

import argparse
import asyncio
import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Final

RACES: Final = (
    "(k3_ or k4_ or k8_ or k11_ or c6_cancelled or cancelled_while_its_worker or x5_a_fork or two_at_once or comes_up "
    "or death_in_a_batch or sigterm_in_the_middle or what_is_behind_a_heavy_item or keys_over_deaths or deaths_in_between "
    "or killed_while_it_replaces or at_once_and_again) and not fake and not spawn and not uvloop"
)
DEFAULT: Final = ("-k", RACES, "tests/contract", "tests/e2e")
LIMIT: Final = 50
"""Seconds that a test has when it is alone, as pyproject.toml says."""
PATIENCE: Final = 20.0
"""Seconds a run has to end its programs after an interrupt."""
FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.MULTILINE)
KEPT: Final = Path("build/repeat")


def failures(output: str, status: int) -> list[str]:
    """Return the tests that failed in a run, by pytest's summary; a run that failed otherwise counts as one."""
    found = list(dict.fromkeys(FAILED.findall(output)))
    return found or ([f"(a run that ended with status {status} and names no test)"] if status else [])


class Repetition:
    """The runs of one selection, and what failed in them."""

    def __init__(self, times: int, minutes: float, load: int, arguments: list[str], folder: Path) -> None:
        """`folder`: each run keeps its tests' files in a folder of its own there. Else runs would tidy up each other's."""
        self._numbers = iter(range(1, times + 1))
        self._until = time.monotonic() + minutes * 60
        self._load = load
        self._folder = folder
        limits = ["-o", f"timeout={LIMIT * load}", "-o", f"faulthandler_timeout={(LIMIT + 10) * load}"]
        self._command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *limits, *arguments]
        self.failed: Counter[str] = Counter()
        self.begun = 0
        self.done = 0

    async def run(self) -> None:
        """Run all of them, so many at once."""
        async with asyncio.TaskGroup() as lanes:
            for _ in range(self._load * len(os.sched_getaffinity(0))):
                lanes.create_task(self._lane())

    async def _lane(self) -> None:
        for number in self._numbers:
            if time.monotonic() > self._until:
                break
            await self._one(number)

    async def _one(self, number: int) -> None:
        path = KEPT / f"run-{number}.txt"
        begun = time.monotonic()
        self.begun += 1
        with path.open("wb") as file:
            # In a session of its own, so that Ctrl-C reaches it once, from here.
            run = await asyncio.create_subprocess_exec(
                *self._command,
                f"--basetemp={self._folder / str(number)}",
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = await run.wait()
            except asyncio.CancelledError:
                await end(run)
                self._note(path, 0)  # the tests that had failed until then
                raise
        output, failed = self._note(path, status)
        shutil.rmtree(self._folder / str(number), ignore_errors=True)
        self.done += 1
        last = output.strip().rpartition("\n")[2].strip("= ")
        print(f"run {number}: {last} ({time.monotonic() - begun:.0f} s){f', see {path}' if failed else ''}", flush=True)

    def _note(self, path: Path, status: int) -> tuple[str, list[str]]:
        output = path.read_text(errors="replace")
        failed = failures(output, status)
        self.failed.update(failed)
        if not failed:
            path.unlink()
        return output, failed


async def end(run: asyncio.subprocess.Process) -> None:
    """End a run as Ctrl-C does, so that its fixtures end their programs; at last by force."""
    with contextlib.suppress(ProcessLookupError):
        run.send_signal(signal.SIGINT)
    try:
        await asyncio.wait_for(run.wait(), PATIENCE)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        await run.wait()


def main() -> int:
    """Repeat, and sum up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--load", type=int, default=4)
    parser.add_argument("arguments", nargs="*", metavar="PYTEST_ARGUMENT")
    asked = parser.parse_args()
    shutil.rmtree(KEPT, ignore_errors=True)
    KEPT.mkdir(parents=True)
    # A shell that starts this in the background has SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    with tempfile.TemporaryDirectory(prefix="repeat-", ignore_cleanup_errors=True) as folder:
        repetition = Repetition(asked.times, asked.minutes, asked.load, asked.arguments or list(DEFAULT), Path(folder))
        try:
            asyncio.run(repetition.run())
        except KeyboardInterrupt:
            print("== interrupted", flush=True)
    print(f"== {repetition.done} of {asked.times} runs ended, {len(repetition.failed)} tests failed")
    for test, count in repetition.failed.most_common():
        print(f"   {count} of {repetition.begun} times: {test}")
    return 1 if repetition.failed or not repetition.done else 0


if __name__ == "__main__":
    sys.exit(main())
