"""Programs that send and receive large buffers: python -m tests.e2e.buffer_programs STORY ARGUMENTS"""

import asyncio
import contextlib
import faulthandler
import gc
import os
import resource
import signal
import sys
from typing import Any

import psutil

import percore
from tests.contract import buffer_jobs as arrays
from tests.e2e import buffer_calls as calls
from tests.e2e.fault_programs import fds, run, say
from tests.internals import arena_of, slots_used
from tests.jobs import apass_gate

faulthandler.register(signal.SIGUSR1, all_threads=True)

MEGABYTE = 1 << 20


def killed(loop: str, way: str, gate: str) -> None:
    """The program dies while it sends, or while it receives."""
    run(loop, _killed(way, gate))


async def _killed(way: str, gate: str) -> None:
    async with percore.Runner(2, blocked_after=None) as runner:
        held = await runner.run(arrays.anumbers, 1)
        waiting = runner.submit(calls.wait_for_ever, held)
        await runner.broadcast(calls.how_many_made)
        say("ready")
        await apass_gate(gate)
        if way == "sends":
            await runner.run(calls.mapping_when_read, calls.dies_when_written(MEGABYTE))
        else:
            await runner.run(calls.dies_when_read, MEGABYTE)
        await waiting
    say("never")


def gone_after_close(loop: str, megabytes: str) -> None:
    """What is left when large arrays have gone both ways, and when the runner is closed."""
    run(loop, _gone_after_close(int(megabytes)))


async def _gone_after_close(megabytes: int) -> None:
    size = megabytes * MEGABYTE // 8
    async with percore.Runner(1, blocked_after=None) as runner:
        await runner.run(arrays.anumbers, 0)
    gc.collect()
    before, fds_before = psutil.Process().memory_info().rss, fds()
    async with percore.Runner(2, blocked_after=None) as runner:
        arrays_there = [await runner.run(arrays.numbers, place, size) for place in range(3)]
        arrived = [arrays.is_numbers(place, array) for place, array in enumerate(arrays_there)]
        arrived += [await runner.run(arrays.is_numbers, place, array) for place, array in enumerate(arrays_there)]
        say("arrived", all(arrived))
        arrays_there.clear()
        await asyncio.sleep(0)  # the loop hears of it
        await runner.broadcast(calls.how_many_made)  # and, before that is answered, the workers
        while slots_used(runner):
            await runner.broadcast(calls.how_many_made)
        say("warm", calls.mappings_of_arena())
    del runner
    gc.collect()
    say("grown", psutil.Process().memory_info().rss - before)
    say("left", [name for name in fds() if name not in fds_before])
    say("mapped", calls.memfds_mapped())


def short_of_space(loop: str, megabytes: str) -> None:
    """Under a limit of the address space there are few slots, and arrays go both ways all the same."""
    run(loop, _short_of_space(int(megabytes)))


async def _short_of_space(megabytes: int) -> None:
    limit = megabytes * MEGABYTE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    async with percore.Runner(2, max_message=256 * MEGABYTE, blocked_after=None) as runner:
        say("slots", arena_of(runner).count)
        places = range(60)
        kept: list[Any] = await runner.map(arrays.anumbers, places)
        say("back", all(arrays.is_numbers(place, array) for place, array in enumerate(kept)))
        for _ in range(2):
            say("there", all(await runner.map(arrays.ause_up, places, map(arrays.numbers, places))))
        say("kept", all(arrays.is_numbers(place, array) for place, array in enumerate(kept)))
        with contextlib.suppress(MemoryError):
            kept.append(await runner.run(arrays.numbers, 0, 30 * MEGABYTE))
        kept.clear()
        await runner.broadcast(calls.drop)
    say("end", os.getpid())


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
