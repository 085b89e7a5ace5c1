"""Runs the tests with the most races many times, with four runs at once on every CPU: python scripts/soak.py [TIMES]

A test that passes on an idle machine says little about a race. The load of each run is three other runs. The exit
status is 1 if one of them fails; its output is printed.
"""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

RACES = (
    "(k3_ or k4_ or k8_ or k11_ or c6_cancelled or cancelled_while_its_worker or x5_a_fork or two_at_once or comes_up "
    "or death_in_a_batch or sigterm_in_the_middle or what_is_behind_a_heavy_item or keys_over_deaths or deaths_in_between "
    "or killed_while_it_replaces or at_once_and_again) and not fake and not spawn and not uvloop"
)
FOLDERS = ("tests/contract", "tests/e2e")
LOAD = 4


def run(number: int) -> int:
    """One run; its exit status."""
    at_once = str(len(os.sched_getaffinity(0)))
    command = [sys.executable, "-m", "pytest", "-q", "-n", at_once, "-k", RACES, "-p", "no:cacheprovider", *FOLDERS]
    begun = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = done.stdout.strip().rpartition("\n")[2]
    print(f"run {number}: {last} ({time.monotonic() - begun:.0f} s)", flush=True)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", flush=True)
    return done.returncode


def main(times: int) -> int:
    with ThreadPoolExecutor(LOAD) as four:
        return 1 if any(list(four.map(run, range(1, times + 1)))) else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20))
