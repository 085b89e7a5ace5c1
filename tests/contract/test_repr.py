"""What a runner and its calls, maps and streams say of themselves, and the table of a runner's statistics."""

import asyncio
import os
import re
import sys

import psutil
import pytest

from tests import jobs
from tests.contract.conftest import MakeRunner
from tests.contract.pipes import Gate, Log
from tests.internals import nodes_of


async def test_a_runner_tells_its_state_its_workers_and_its_calls(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make(2, concurrency=1)
    assert repr(runner) == "<percore.Runner not started workers=2>"
    async with runner:
        assert repr(runner) == "<percore.Runner open workers=2 ready=2 in_flight=0>"
        calls = [runner.submit(jobs.await_, log.path, gate.path, place) for place in range(3)]
        await log.take(2)
        assert repr(runner) == "<percore.Runner open workers=2 ready=2 in_flight=3>"
        closing = asyncio.create_task(runner.aclose())
        await asyncio.sleep(0)
        assert repr(runner) == "<percore.Runner closing workers=2 ready=2 in_flight=3>"
        gate.open()
        await asyncio.gather(*calls)
        await closing
    assert repr(runner) == "<percore.Runner closed workers=2>"


async def test_a_call_tells_where_it_is(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(1, concurrency=1, threads=1) as runner:
        running = runner.submit(jobs.await_, log.path, gate.path, 0)
        await log.next()
        waiting = [runner.submit(jobs.await_, log.path, gate.path, place) for place in (1, 2)]
        assert re.match(r"<Call of await_ pending \((runs )?in worker 0(, for \S+ s)?\)", repr(running))
        assert repr(waiting[-1]).startswith("<Call of await_ pending (waits for a worker)")
        waiting[-1].cancel()
        assert repr(waiting[-1]).startswith("<Call of await_ cancelled")
        gate.open()
        assert await running == 0
        assert repr(running).startswith("<Call of await_ finished result=0")
        await waiting[0]


async def test_a_call_tells_that_it_waits_in_its_worker_or_was_there_when_it_died(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(1, threads=1) as runner:
        running = runner.submit(jobs.wait, log.path, gate.path, 0)
        await log.next()
        ahead = runner.submit(jobs.wait, log.path, gate.path, 1)
        assert re.match(r"<Call of wait pending \((runs in worker 0, for \S+ s|in worker 0)\)", repr(running))
        assert re.match(r"<Call of wait pending \((waits )?in worker 0\)", repr(ahead))
        gate.open()
        await asyncio.gather(running, ahead)


async def test_a_map_tells_how_far_it_is(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(1) as runner:
        mapped = runner.map(jobs.await_, [log.path] * 3, [gate.path] * 3, iter("abc"))
        assert repr(mapped) == "<percore.Map of await_ not used done=0 pulled=0 total=3>"
        collecting = asyncio.create_task(mapped.collect())
        await log.take(3)
        assert repr(mapped) == "<percore.Map of await_ running done=0 pulled=3 total=3>"
        gate.open()
        await collecting
        assert repr(mapped) == "<percore.Map of await_ ended done=3 pulled=3 total=3>"

        failing = runner.map(jobs.fail, iter([ValueError, KeyError]), return_exceptions=True)
        await failing
        assert repr(failing) == "<percore.Map of fail ended done=2 failed=2 pulled=2>"


class Unsized(list[int]):
    def __len__(self) -> int:
        raise OSError("no length today")


async def test_a_map_s_repr_survives_inputs_that_fail(make: MakeRunner) -> None:
    async with make(1) as runner:
        mapped = runner.map(jobs.echo, Unsized([1]))
        assert repr(mapped) == "<percore.Map of echo not used done=0 pulled=0>"
        await mapped.aclose()
        assert repr(mapped) == "<percore.Map of echo ended done=0 pulled=0>"


async def test_a_stream_tells_how_far_it_is(make: MakeRunner) -> None:
    async with make(1) as runner, runner.options(prefetch=1).stream(jobs.numbers) as stream:
        assert repr(stream) == "<percore.Stream of numbers not used taken=0 arrived=0>"
        await anext(stream)
        assert re.fullmatch(r"<percore.Stream of numbers running taken=1 arrived=[12]>", repr(stream))
        await stream.aclose()
        assert "<percore.Stream of numbers ended taken=" in repr(stream)


async def test_statistics_are_a_table(make: MakeRunner) -> None:
    async with make(2) as runner:
        await runner.map(jobs.fail, [ValueError] * 3, return_exceptions=True)
        statistics = runner.statistics()
    head, *workers, total, _, _, function = str(statistics).splitlines()
    columns = ["worker", "state", "PID", "running", "queued", "done", "failed", "retried", "restarts", "lag"]
    assert head.split() == columns + ["node"] * bool(nodes_of(runner))
    assert [line.split()[:2] for line in workers] == [["0", "ready"], ["1", "ready"]]
    assert total.split() == ["total", "0", "0", "3", "3", "0", "0"]
    html = statistics._repr_html_()
    assert function.split()[:4] == ["tests.jobs.fail", "0", "3", "3"]
    assert html.count("<tr>") == 4 + 2
    assert ">total</td>" in html


@pytest.mark.skipif(sys.version_info < (3, 14), reason="Python 3.14 brings call graphs")
async def test_a_call_graph_shows_what_awaits_a_call(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(1) as runner:

        async def caller() -> None:
            await runner.run(jobs.await_, log.path, gate.path, 1)

        task = asyncio.create_task(caller())
        await log.next()
        graph: str = asyncio.format_call_graph(task)  # type: ignore[attr-defined]
        assert "async Verbs.run()" in graph
        assert "caller()" in graph
        gate.open()
        await task


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="only Linux shows titles")
async def test_a_worker_s_process_has_a_title(make_real: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/srv/crawl.py"])
    async with make_real(2) as runner:
        pids = [worker.pid for worker in runner.statistics().workers]
        assert [title_of(pid) for pid in pids] == ["percore: worker 0 of crawl.py", "percore: worker 1 of crawl.py"]
        helpers = [one.pid for one in (await runner.usage()).processes if one.role == "fork server"]
        assert all(title_of(pid).startswith("percore: fork server") for pid in helpers)


def title_of(pid: int | None) -> str:
    return " ".join(psutil.Process(pid).cmdline())
