"""A call is cancelled while its worker stands at a step of it, whichever: one outcome, and the worker goes on."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import percore
from tests.e2e import fault_calls as calls
from tests.e2e.deaths import ended, serves
from tests.faults import LIMIT, Wire
from tests.internals import members_of, slots_used
from tests.sweep import places
from tests.waiting import until

LARGE = 200_000


class Stops:
    """Lets a worker stand at a place until it may go on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.hits = Wire(folder / "hits")
        self.gate = Wire(folder / "gate")

    async def is_hit_before(self, place: str, future: "asyncio.Future[Any]") -> bool:
        """Whether a worker comes to the place before the call has ended."""
        hit = asyncio.create_task(self.hits.line())
        await asyncio.wait([hit, future], return_when=asyncio.FIRST_COMPLETED, timeout=LIMIT)
        if not hit.done():
            try:
                (self.folder / place).unlink()
            except FileNotFoundError:  # the plan was taken meanwhile: word of it is on its way
                await hit
                return True
            hit.cancel()
            await asyncio.wait([hit])
            return False
        return True


@pytest.fixture
def stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stops]:
    stops = Stops(tmp_path / "points")
    monkeypatch.setenv("PERCORE_POINTS", str(stops.folder))
    yield stops
    stops.hits.close()
    stops.gate.close()


@pytest.mark.parametrize(
    ("call", "args"),
    [
        (calls.who, ()),
        (calls.who_in_thread, ()),
        (calls.accept, (bytes(LARGE),)),
        (calls.pattern_in_task, (7, LARGE)),
        (calls.pattern, (7, LARGE)),
    ],
    ids=["task", "thread", "large arguments", "large result of a task", "large result of a thread"],
)
async def test_c3_cancelled_while_its_worker_stands_at_a_step_of_it(call: Any, args: Any, stops: Stops) -> None:
    stood = set()
    async with percore.Runner(1, threads=2) as runner:
        pid = (await ended(runner.submit(calls.who)))[2]
        for place in places.STEPS:
            (stops.folder / f"{place}.new").write_text("tell#0.1!")
            (stops.folder / f"{place}.new").rename(stops.folder / place)
            future = runner.submit(call, *args)
            if not await stops.is_hit_before(place, future):
                continue
            stood.add(place)
            cancelled = future.cancel()  # False: all that was to be heard of it has been heard, and the worker only cleans up
            await asyncio.sleep(0)  # the cancellation is sent
            stops.gate.give(1)
            assert future.cancelled() == cancelled
            await serves(runner)
            assert (await ended(runner.submit(calls.who)))[2] == pid
            async with asyncio.timeout(LIMIT):  # the other thread has served these calls, and the one that stood may come late
                await until(lambda: not any(member.pending for member in members_of(runner)))
            assert slots_used(runner) == 0
    assert not {f"worker.{step}" for step in ("bell.read", "call.marked", "call.running", "frame.written")} - stood
    assert stood & {"worker.outcome.ready", "worker.outcome.stored"}
