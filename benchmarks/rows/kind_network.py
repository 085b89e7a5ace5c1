"""Four tasks of network work at once: 1, 3 and 5 HTTP requests in a row each, to a local server that takes 50 ms.

The executors run a plain function, percore a coroutine with the worker's session, as one would write it for each; see
benchmarks/_kinds.py for what is measured.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks._kinds import Kind, row_of
from benchmarks.kinds import ask, ask_async, http

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks._harness import Row

_PROGRAM = Path(__file__).parents[1] / "_server_program.py"
LATENCY, SIZE = 0.05, 10_000
REQUESTS = (1, 3, 5)


def row(*, quick: bool) -> Row:
    return row_of(Kind("network", ask, REQUESTS, in_percore=ask_async, lifespan=http, serve=_server), quick=quick, seconds=40)


@asynccontextmanager
async def _server() -> AsyncIterator[tuple[str]]:
    command = [sys.executable, str(_PROGRAM), str(LATENCY), str(SIZE)]
    pipe = subprocess.PIPE
    process = await asyncio.to_thread(subprocess.Popen, command, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    try:
        yield ((await asyncio.to_thread(process.stdout.readline)).strip(),)
    finally:
        await asyncio.to_thread(process.communicate)  # closes its standard input, which ends it, and reaps it
