"""Histories of the explorer (`tests/unit/call_orders.py`) with real workers: the same seed, the same steps in the same order.

What the user does, deaths and SIGTERM happen as in the history. The steps of its workers are turns of the loop here: what real ones
do meanwhile is theirs. Each call writes down that it begins, and each caller has to be told the truth.
"""

import asyncio
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

import percore
from percore._protocol.messages import Kind
from tests.counts import times
from tests.e2e import history_calls
from tests.internals import current_member
from tests.unit.call_orders import Case, stroll, watched

CASE: Final = Case(
    {"dies": 3, "drains": 1, "cancels": 3, "reloads": 1, "grows": 1, "shrinks": 1, "closes": 1, "cuts": 1},
    calls=12,
    options={"concurrency": 2, "threads": 2},
    of_call=({"retries": 1}, {}, {"key": "k", "retries": 1}),
)
STRIKES: Final = {"dies": signal.SIGKILL, "drains": signal.SIGTERM}


class History:
    """One history, taken by a real runner."""

    def __init__(self, case: Case, ledger: Path) -> None:
        self.case = case
        self.ledger = ledger
        self.calls: list[Any] = []
        self.cancelled: set[int] = set()
        self.closing: list[asyncio.Task[None]] = []
        self.changes: list[asyncio.Task[None]] = []

    async def take(self, path: list[str]) -> None:
        """Take all steps, let everything end, and judge it."""
        async with asyncio.timeout(40):
            self.runner = percore.Runner(self.case.workers, **self.case.options)
            await self.runner.start()
            for step in path:
                event, _, about = step.partition(" ")
                self.step(event, about)
                await asyncio.sleep(0)
            if self.calls and not self.closing:  # a closing runner replaces no dead worker: all calls end before
                await asyncio.wait(self.calls)
            await asyncio.wait([*self.closing, asyncio.ensure_future(self.runner.aclose())])
            changed = await asyncio.gather(*self.changes, return_exceptions=True)
        assert all(error is None or isinstance(error, percore.PercoreError) for error in changed), changed
        ran = Counter(map(int, self.ledger.read_text().split())) if self.ledger.exists() else Counter[int]()
        for number, call in enumerate(self.calls):
            self.judge(number, call, ran[number])

    def step(self, event: str, about: str) -> None:
        if event == "submits":
            number = len(self.calls)
            view = self.runner.options(**self.case.options_of(number))
            fn = history_calls.as_task if self.case.kind == Kind.TASK else history_calls.on_thread
            self.calls.append(view.submit(fn, str(self.ledger), number))
        elif event == "cancels":
            self.cancelled.add(int(about))
            self.calls[int(about)].cancel()
        elif event in STRIKES and not any(task.done() for task in self.closing):  # real workers may have ended by then
            index = int(about[1:].partition(".")[0])
            if index < len(self.runner.statistics().workers) and (member := current_member(self.runner, index)) is not None:
                member.worker.kill(STRIKES[event])
        elif event in ("closes", "cuts"):
            self.closing.append(asyncio.ensure_future(self.runner.aclose(grace=None if event == "closes" else 0)))
        elif event == "reloads":
            self.changes.append(asyncio.ensure_future(self.runner.reload()))
        elif event in ("grows", "shrinks"):
            workers_then = self.case.workers + (1 if event == "grows" else -1)
            self.changes.append(asyncio.ensure_future(self.runner.resize(workers_then)))

    def judge(self, number: int, call: Any, ran: int) -> None:
        """The caller was told the truth. A worker counts a call as begun just before it does anything."""
        assert ran <= 1 + self.case.options_of(number).get("retries", 0), f"call {number} ran {ran} times"
        if call.cancelled():
            assert number in self.cancelled, f"call {number} was cancelled by nobody"
            return
        error = call.exception()
        if error is None:
            assert (call.result(), ran > 0) == (number, True), f"call {number} ran {ran} times and gave {call.result()}"
        elif isinstance(error, percore.WorkerDied):
            assert ran <= error.attempts, f"call {number} began {ran} times, and its caller was told {error.attempts}"
        else:
            assert isinstance(error, percore.RunnerClosed), repr(error)
            assert self.closing, "nobody closed the runner"


@pytest.mark.long
@pytest.mark.timeout(times(50, 1800))
def test_histories_of_the_explorer_end_as_they_must_with_real_workers(tmp_path: Path) -> None:
    for seed in range(times(6, 500)):
        case = CASE._replace(kind=(Kind.TASK, Kind.THREAD)[seed % 2])
        with watched():
            path = stroll(case, random.Random(seed).randrange, 200)
        try:
            asyncio.run(History(case, tmp_path / str(seed)).take(path))
        except BaseException as error:
            error.add_note(f"the history of seed {seed}: {', '.join(path)}")
            raise
