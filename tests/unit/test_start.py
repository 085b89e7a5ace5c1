"""The start of a runner that is cancelled or closed while it gives back its early share of the fork server. No worker starts."""

import asyncio
from typing import Any

import pytest

from percore import Runner, RunnerClosed
from percore._engines.processes.fork_servers import servers
from percore._runner import runner as of_runner


class Early:
    """The share in the fork server that a start has before its engine has one. Giving it back takes until `go_on`."""

    def __init__(self) -> None:
        self.is_left, self.go_on = asyncio.Event(), asyncio.Event()

    async def aclose(self) -> None:
        self.is_left.set()
        await self.go_on.wait()


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> Early:
    early = Early()
    monkeypatch.setattr(of_runner, "warm_up", lambda _options: early)
    return early


@pytest.mark.parametrize("how", ["cancelled", "closed"])
async def test_a_start_that_ends_before_its_workers_leaves_nothing(early: Early, how: str) -> None:
    before: set[Any] = set(servers._members)
    runner = Runner(1)
    start = asyncio.create_task(runner.start())
    await early.is_left.wait()
    if how == "cancelled":
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
    else:
        await runner.aclose()
        early.go_on.set()
        with pytest.raises(RunnerClosed, match="closed while it started"):
            await start
    assert servers._members == before  # else the fork server would never end
    assert "closed" in repr(runner)
