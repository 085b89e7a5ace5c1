"""Plain functions that compute until something happens, for the tests of how many calls of a function run at once."""

import os
import threading

from tests.jobs import pass_gate, say

_meeting = threading.Barrier(4)


def compute(log: str, until: str) -> None:
    """Say so, and compute until the file is there."""
    say(log, "began")
    while not os.path.exists(until):  # cheap
        pass


def compute_and_wait(log: str, until: str, gate: str) -> None:
    """Compute until the file is there, and then wait for the gate."""
    compute(log, until)
    pass_gate(gate)


def compute_and_meet(until: str) -> None:
    """Compute until the file is there, and then wait for three other calls in this worker."""
    while not os.path.exists(until):  # cheap
        pass
    _meeting.wait()
