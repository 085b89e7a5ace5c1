"""From the kill of an idle worker to an answer of the one that replaces it, 1 worker.

The worker is killed with SIGKILL, and the same moment a call is made: it waits until the death was seen, a new process
was forked and made ready, and that has answered. No peer is here: a pool of the standard library, or loky, is broken by
this, and of the others each leaves calls hanging.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import percore
from benchmarks._figures import Limit, latencies
from benchmarks._harness import Round, Row, Sample

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def row(*, quick: bool) -> Row:
    return Row(
        contestants={"percore": partial(_percore, 5 if quick else 40)},
        targets=[Limit("percore", "p50", at_most=0.010)],
        rounds=3 if quick else 7,
        seconds=5 if quick else 8,
        is_cheap=True,
    )


@asynccontextmanager
async def _percore(kills: int) -> AsyncIterator[Round]:
    logging.getLogger("percore").setLevel(logging.ERROR)  # every death is a warning
    async with percore.Runner(workers=1) as runner:

        async def once() -> Sample:
            return latencies([await _replaced(runner) for _ in range(kills)])

        yield once


async def _replaced(runner: percore.Runner) -> float:
    pid = await runner.run(os.getpid)
    start = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    # A call that was sent to the dead one and had not begun goes to the next.
    while await runner.run(os.getpid) == pid:
        pass
    return time.perf_counter() - start
