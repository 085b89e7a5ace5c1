"""The page of a runner, which `percore top` reads: when it is written, and that it ends with the runner."""

import errno
import json
import logging
import os
import sys
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

import percore
from percore._attach.programs import ProgramGone, read
from percore._common.system import HAS_MEMFD
from percore._monitor.page import PageFile
from percore._monitor.views import Model
from percore._supervisor import publication
from percore._web.feed import Feed
from tests import jobs
from tests.contract.conftest import MakeRunner
from tests.contract.pipes import Gate, Log
from tests.hosts import NodesRunner, engine_of, inner_hosts
from tests.internals import current_member
from tests.waiting import until

pytestmark = [
    pytest.mark.skipif(not HAS_MEMFD, reason="pages are memfds"),
    pytest.mark.filterwarnings("error"),
]


def is_published() -> bool:
    try:
        return bool(read(os.getpid()))
    except ProgramGone:
        return False


def states() -> list[str]:
    return [worker["state"] for page in read(os.getpid()) for worker in page["statistics"]["workers"]] if is_published() else []


def due() -> float | None:
    (page,) = read(os.getpid())
    found: float | None = page["due"]
    return found


@pytest.mark.apart(because="a worker that is a process has a pid, and an end, of its own")
async def test_a_page_is_there_from_soon_after_the_start_to_the_end(make: MakeRunner) -> None:
    async with make(2) as runner:
        await until(lambda: states() == ["ready", "ready"])  # where processes start slowly, the first page says "starting"
        await until(lambda: due() is None)  # at rest: nothing is written until the next call
        await runner.map(jobs.echo, range(100))
        await until(lambda: read(os.getpid())[0]["statistics"]["done"] == 100)
    assert not is_published()


def test_the_loop_imports_what_pages_need_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runner:
        def is_busy(self) -> bool:
            raise LookupError("the first page is written")

    later: list[Any] = []

    def call_later(_seconds: float, callback: Any) -> Any:
        later.append(callback)
        return SimpleNamespace(when=lambda: 0.0, cancel=lambda: None)

    loop: Any = SimpleNamespace(call_later=call_later, time=lambda: 0.0)
    imported: list[str] = []
    watched: Any = SimpleNamespace(on_rest=None)

    def import_uncollected(name: str) -> None:
        imported.append(name)
        monkeypatch.setitem(sys.modules, name, sys)

    monkeypatch.setattr(publication, "_MODULES", ("one", "sys", "two"))
    monkeypatch.setattr(percore, "_import_uncollected", import_uncollected)
    runner: Any = Runner()
    published = publication.Publication(loop, runner, watched, is_on=True)
    published.touch()
    for number in range(1, 3):
        later.pop()()
        assert len(imported) == number
    assert imported == ["one", "two"]
    with pytest.raises(LookupError):
        later.pop()()
    published.close()


async def test_a_replacement_is_told_at_rest(make: MakeRunner) -> None:
    async with make(1) as runner:
        await until(is_published)
        current_member(runner).worker.kill()  # type: ignore[union-attr]
        await until(lambda: read(os.getpid())[0]["statistics"]["workers"][0]["generation"] == 2)


async def test_pages_that_take_long_are_written_less_often(
    make: MakeRunner, log: Log, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def period() -> float:
        return 0.0 if not is_published() or (next_one := due()) is None else next_one - read(os.getpid())[0]["at"]

    monkeypatch.setattr("percore._supervisor.publication._PERIOD", 0.01)
    monkeypatch.setattr("percore._supervisor.publication.thread_time", count(0.0, 0.001).__next__)  # each page takes a millisecond
    async with make(1) as runner:
        call = runner.submit(jobs.await_, log.path, gate.path)
        await until(lambda: period() == pytest.approx(0.05))
        gate.open()
        await call


async def test_without_a_descriptor_there_is_no_page_and_calls_go_on(
    make: MakeRunner, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(_page: PageFile) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(PageFile, "__init__", none_left)
    with caplog.at_level(logging.DEBUG, "percore"):
        async with make(1) as runner:
            await until(lambda: "its page could not be written: [Errno 24]" in caplog.text)
            assert await runner.run(jobs.echo, 1) == 1
    assert caplog.text.count("could not be written") == 1


async def test_a_page_that_cannot_be_written_goes_away(
    make: MakeRunner, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_page: PageFile, _data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with caplog.at_level(logging.DEBUG, "percore"):
        async with make(1) as runner:
            await until(is_published)
            monkeypatch.setattr(PageFile, "write", full)
            await runner.run(jobs.echo, 1)
            await until(lambda: not is_published())
            assert await runner.run(jobs.echo, 2) == 2
    assert caplog.text.count("could not be written: [Errno 28]") == 1


async def test_switched_off_there_is_no_page(make: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("percore._supervisor.supervisor.metrics_wanted", lambda: False)
    async with make(1) as runner:
        await runner.run(jobs.echo, 1)
        monkeypatch.undo()
        async with make(1):  # its page would come after that of the other
            await until(is_published)
            assert len(read(os.getpid())) == 1


async def test_runners_have_a_page_each(make: MakeRunner) -> None:
    async with make(1), make(1):
        await until(lambda: is_published() and len(read(os.getpid())) == 2)


@pytest.mark.warm_fork_server(imports="numpy")
async def test_the_page_has_what_workers_on_nodes_use(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("percore._supervisor.usage_elsewhere._EVERY", 0.0)
    with caplog.at_level(logging.DEBUG, "percore"):
        async with NodesRunner(2) as runner:
            await until(lambda: is_published() and len(read(os.getpid())[0]["elsewhere"]) >= 4)  # also without calls
            view = Model(os.getpid()).view(read(os.getpid()))
            assert [(one.node, getattr(one.usage, "rss", 0) > 2**20) for one in view.workers] == [("a", True), ("b", True)]
            feed = Feed(lambda: runner, 0.1, os.getpid())
            shown = json.loads(await feed.snapshot())["view"]["workers"]
            assert [one["usage"]["rss"] > 2**20 for one in shown] == [True, True], "in the dashboard, too"
            for host in inner_hosts(engine_of(runner)):
                monkeypatch.setattr(host.engine, "usage", None)
            await until(lambda: "cannot show what workers on nodes use" in caplog.text)
            shown = json.loads(await Feed(lambda: runner, 0.1, os.getpid()).snapshot())["view"]["workers"]
            assert [one["usage"] for one in shown] == [None, None]
            assert await runner.run(jobs.aecho, 1) == 1
    assert caplog.text.count("cannot show what workers on nodes use") == 1
