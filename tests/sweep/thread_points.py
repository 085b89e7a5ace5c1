"""The sweep over workers that are threads: what a thread of a program can suffer, at each step of a call and at its end."""

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.sweep.places import OF_THREADS

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("place", OF_THREADS)
def test_a_thread_is_struck_at_each_passing(place: str, record_property: Callable[[str, object], None]) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.sweep.thread_program", place],
        env={**os.environ, "PERCORE_POINTS": "none=tell"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    hits = [line.split() for line in run.stdout.splitlines()]
    for _, _, death, _ in hits:
        record_property("hit", json.dumps(["A worker that is a thread", place, death, "busy"]))
    assert {death for _, _, death, _ in hits} == {"kill", "hold", "interrupt", "cancel", "close"}
