"""Runs `program.py` under an interpreter, with a time limit for each test, and counts.

python -m tests.stdlib.harness [METHOD ...]      this interpreter, percore and the control; status 1 where they differ from the list
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.stdlib.left_out import LEFT_OUT
from tests.stdlib.program import METHODS

PROGRAM = Path(__file__).with_name("program.py")
LIMIT = 60.0
"""Seconds for one test. The longest takes six."""


class Absent(Exception):
    """This interpreter comes without the tests."""


@dataclass
class Report:
    """What came of the tests of one start method."""

    outcomes: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def add(self, outcome: str, name: str, text: str) -> None:
        self.outcomes[name] = outcome
        self.texts[name] = text

    def count(self) -> Counter[str]:
        return Counter(self.outcomes.values())


def names(method: str) -> list[str]:
    """The tests there are.

    Raises:
        Absent: none; the text says what to do.
    """
    lines, _ = _run("control", method, [])
    absent = [text for outcome, _, text in lines if outcome == "absent"]
    if absent:
        raise Absent(
            f"{sys.executable} comes without CPython's own tests ({absent[0]}): Debian and Ubuntu have them in "
            "libpython3-testsuite, Fedora in python3-test; a build from source has them"
        )
    return [name for outcome, name, _ in lines if outcome == "there is"]


def run(whose: str, method: str, wanted: list[str]) -> Report:
    """Run these tests, each within its limit."""
    report = Report()
    left = list(wanted)
    while left:
        lines, end = _run(whose, method, left)
        began = ""
        for outcome, name, text in lines:
            if outcome == "began":
                began = name
            else:
                report.add(outcome, name, text)
                began = ""
        if began:
            report.add(end, began, "")
        left = [name for name in left if name not in report.outcomes]
        if not lines:
            for name in left:
                report.add("failed", name, f"its process {end}")
            break
    return report


def _run(whose: str, method: str, wanted: list[str]) -> tuple[list[tuple[str, str, str]], str]:
    """What one process told, and how it ended."""
    read_end, write_end = os.pipe()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), str(write_end), whose, method, *wanted],
            pass_fds=[write_end],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        os.close(write_end)
        end = "crashed"
        data = bytearray()
        poll = select.poll()
        poll.register(read_end, select.POLLIN)
        try:
            while True:
                if not poll.poll(LIMIT * 1000):
                    end = "took too long"
                    break
                part = os.read(read_end, 65536)
                if not part:
                    break
                data += part
        finally:
            os.close(read_end)
            if end == "took too long":
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    told = [json.loads(line) for line in data.decode().splitlines()]
    return [(outcome, name, text) for outcome, name, text in told], end


def reason(name: str, method: str) -> str | None:
    """Why a test is left out, None where it is not."""
    test = name.rpartition(".")[2]
    for one in LEFT_OUT:
        if test == one.test and (one.methods is None or method in one.methods) and one.part in name:
            return one.reason
    return None


def judge(method: str, wanted: list[str]) -> tuple[Report, list[str]]:
    """Run them for percore; what is wrong with the outcome, a sentence each. Tests on the list are run, too, and must not pass."""
    report = run("percore", method, wanted)
    wrong = []
    for name, outcome in report.outcomes.items():
        why = reason(name, method)
        if why is None and outcome not in ("passed", "skipped"):
            wrong.append(f"{method} {name} {outcome}:\n{report.texts[name]}")
        elif why is not None and outcome == "passed":
            wrong.append(f"{method} {name} passes, and is left out because: {why}")
    return report, wrong


def main() -> None:
    methods = [one for one in sys.argv[1:] if one in METHODS] or list(METHODS)
    failed = False
    version = ".".join(map(str, sys.version_info[:3]))
    for method in methods:
        try:
            wanted = names(method)
        except Absent as absent:
            _say(str(absent))
            return
        control = run("control", method, wanted).count()
        report, wrong = judge(method, wanted)
        left_out = [name for name in wanted if reason(name, method) is not None]
        rest = Counter(outcome for name, outcome in report.outcomes.items() if name not in left_out)
        _say(f"Python {version} {method}: {len(wanted)} tests")
        _say(f"    ProcessPoolExecutor  {told(control)}")
        _say(f"    LoopPoolExecutor     {told(rest)}, {len(left_out)} left out")
        for sentence in wrong:
            _say("    " + sentence.replace("\n", "\n        "))
        failed |= bool(wrong)
    sys.exit(failed)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def told(count: Counter[str]) -> str:
    return ", ".join(f"{number} {outcome}" for outcome, number in sorted(count.items()))


if __name__ == "__main__":
    main()
