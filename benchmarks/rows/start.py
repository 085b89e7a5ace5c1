"""From the start of a fresh program to answers from its two workers.

A program that imports a library, starts two workers and has calls answered by both: what a command-line tool pays before
its first result, imports included. It is timed from outside, from before the process is started to the moment that the
program itself tells; what it takes to end as well is shown beside it.

All of it is compiled before, as what is installed is: the warm-up leaves bytecode in a folder of the row's own. Without that a
library that is run from its sources, with PYTHONDONTWRITEBYTECODE set, would be compiled anew in each of its processes, and its
peers, which are installed, would not.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks._figures import Target
from benchmarks._harness import Round, Row, Sample

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_ROOT = Path(__file__).parents[2]
WAYS = ("percore", "percore, spawn", "ProcessPoolExecutor, forkserver", "ProcessPoolExecutor, spawn", "loky", "aiomultiprocess")


def row(*, quick: bool) -> Row:
    return Row(
        contestants={way: partial(_program, way) for way in WAYS},
        targets=[Target("percore", "ProcessPoolExecutor, forkserver", "to answers", at_most=1.0, towards=0.8)],
        rounds=3 if quick else 11,
        seconds=8 if quick else 25,
        is_cheap=True,
    )


@asynccontextmanager
async def _program(way: str) -> AsyncIterator[Round]:
    command = [sys.executable, "-m", "benchmarks._start_program", way]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    async def once() -> Sample:
        start = time.perf_counter()
        done = await asyncio.to_thread(
            subprocess.run, command, cwd=_ROOT, env=variables, capture_output=True, text=True, check=False
        )
        end = time.perf_counter()
        if done.returncode:
            missing = done.stderr.splitlines()[-1:] if "ModuleNotFoundError" in done.stderr else []
            raise ModuleNotFoundError(*missing) if missing else RuntimeError(f"the program failed:\n{done.stderr}")
        return {"to answers": float(done.stdout) - start, "to its end": end - start}

    with tempfile.TemporaryDirectory() as variables["PYTHONPYCACHEPREFIX"]:
        yield once
