"""The raciest tests of each group, over and over, while every CPU has four times the work it can do: python scripts/soak.py [TIMES]

A test that passes on an idle machine says little about a race. Stops at the first run that fails, with its output.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

RACES = (
    "(k3_ or k4_ or k8_ or k11_ or c6_cancelled or cancelled_while_its_worker or x5_a_fork or two_at_once or comes_up "
    "or death_in_a_batch or sigterm_in_the_middle or what_is_behind_a_heavy_item or keys_over_deaths or deaths_in_between "
    "or killed_while_it_replaces or at_once_and_again) and not fake and not spawn and not uvloop"
)
FOLDERS = ("tests/contract", "tests/e2e")
LOAD = 4


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that do nothing but keep a CPU busy."""
    # Each ends with its standard input, however this program ends.
    program = (
        "import os, sys, threading\nthreading.Thread(target=lambda: (sys.stdin.read(), os._exit(0))).start()\nwhile True: pass"
    )
    processes = [subprocess.Popen([sys.executable, "-S", "-c", program], stdin=subprocess.PIPE) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def main(times: int) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-k", RACES, "-p", "no:cacheprovider", *FOLDERS]
    with busy(LOAD * len(os.sched_getaffinity(0))):
        for number in range(1, times + 1):
            begun = time.monotonic()
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            last = run.stdout.strip().rpartition("\n")[2]
            print(f"{number} of {times}: {last} ({time.monotonic() - begun:.0f} s)", flush=True)
            if run.returncode:
                print(run.stdout, run.stderr, sep="\n")
                return run.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20))
