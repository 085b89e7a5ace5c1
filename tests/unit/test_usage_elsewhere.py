"""Readings of workers on nodes: one at a time, and never the last one."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from percore._monitor.usage import ProcessUsage
from percore._supervisor import usage_elsewhere
from percore._supervisor.usage_elsewhere import UsageElsewhere


async def test_a_reading_that_ends_while_its_task_is_made_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_elsewhere, "_EVERY", 0.0)
    loop, found = asyncio.get_running_loop(), 0

    async def read() -> Sequence[ProcessUsage]:
        return ()

    def count() -> None:
        nonlocal found
        found += 1

    class Eager:
        """A loop whose tasks begin at once, as with `asyncio.eager_task_factory`."""

        def create_task(self, coroutine: Any, name: str) -> Any:
            with pytest.raises(StopIteration):
                coroutine.send(None)
            done = loop.create_future()
            done.set_result(None)
            return done

    eager: Any = Eager()
    usage = UsageElsewhere(eager)
    for _ in range(2):
        usage.look(read, count)
    assert found == 2
