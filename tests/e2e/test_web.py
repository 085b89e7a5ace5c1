"""percore.web over aiohttp and over ASGI: what the page, the probes and Prometheus get."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.routing import Mount

import percore
import percore.web
from percore._monitor.statistics import Statistics
from percore._web import feed as feed_module
from percore._web.dashboard import Request
from tests import jobs
from tests.fakes import FakeRunner
from tests.internals import supervisor_of
from tests.waiting import until

pytestmark = pytest.mark.warm_fork_server

Get = Callable[..., Awaitable["tuple[int, dict[str, str], str]"]]


@asynccontextmanager
async def over_aiohttp(dashboard: percore.web.Dashboard) -> AsyncIterator[Get]:
    app = web.Application()
    app.add_subapp("/percore", dashboard.application())
    server = web.AppRunner(app)
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", 0).start()

    async def get(path: str, method: str = "GET", **headers: str) -> "tuple[int, dict[str, str], str]":
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        async with session.request(method, url + path, headers=given) as answer:
            return answer.status, {name.lower(): value for name, value in answer.headers.items()}, await answer.text()

    try:
        url = f"http://127.0.0.1:{server.addresses[0][1]}/percore"
        async with aiohttp.ClientSession() as session:
            yield get
    finally:
        await server.cleanup()


@asynccontextmanager
async def over_asgi(dashboard: percore.web.Dashboard) -> AsyncIterator[Get]:
    app = Starlette(routes=[Mount("/percore", dashboard)])

    async def get(path: str, method: str = "GET", **headers: str) -> "tuple[int, dict[str, str], str]":
        given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        asked = {"method": method, "path": "/percore" + path, "headers": given, "query_string": b""}
        return await ask(app, {"type": "http", "root_path": "", **asked})

    yield get


async def ask(app: Any, scope: "dict[str, Any]", events: int = 0) -> "tuple[int, dict[str, str], str]":
    """What an ASGI application answers. `events`: after so many parts the client goes away; 0: it stays."""
    gone, said, body = asyncio.Event(), [], bytearray()

    async def receive() -> "dict[str, Any]":
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: "dict[str, Any]") -> None:
        said.append(message)
        body.extend(message.get("body", b""))
        if events and len(said) > events:
            gone.set()

    await app(scope, receive, send)
    return said[0]["status"], {name.decode(): value.decode() for name, value in said[0]["headers"]}, body.decode()


@pytest.fixture(params=[over_aiohttp, over_asgi], ids=["aiohttp", "asgi"])
def over(request: pytest.FixtureRequest) -> Any:
    return request.param


async def test_what_each_path_answers(over: Any) -> None:
    runner = percore.Runner(workers=2)
    async with over(percore.web.dashboard(runner)) as get:
        assert (await get("/health"))[0] == 503
        assert (await get("/ready"))[0] == 503
        assert "percore_runner_open 0.0" in (await get("/metrics"))[2]
        assert json.loads((await get("/statistics"))[2])["view"] is None
        async with runner:
            assert await runner.map(jobs.echo, range(10)) == list(range(10))
            assert (await get("/health"))[0] == 200
            assert (await get("/ready"))[2] == "2 of 2 workers are ready\n"
            status, headers, page = await get("/")
            assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
            assert "default-src 'none'" in headers["content-security-policy"]
            assert "ACTIONS = false" in page
            assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
            assert "https://" not in page
            assert (await get("/nothing"))[0] == 404
            assert (await get("/metrics", "POST"))[0] == 405
            assert (await get("/recycle/0", "POST", x_percore="recycle"))[0] == 403  # read-only
        assert (await get("/health"))[0] == 503


async def test_metrics_are_what_prometheus_reads(over: Any) -> None:
    async with percore.Runner(workers=2) as runner, over(percore.web.dashboard(lambda: runner)) as get:
        await runner.map(jobs.echo, ["x" * 5000] * 10)
        with pytest.raises(ValueError, match="failed"):
            await runner.run(jobs.afail, ValueError("failed"))
        text = (await get("/metrics"))[2]
        for shown in (text, (await get("/statistics"))[2]):  # no argument, result or error
            assert "xxx" not in shown
            assert "ValueError" not in shown
    families = {family.name: family for family in text_string_to_metric_families(text)}
    done = [sample.value for sample in families["percore_calls_done"].samples if sample.name == "percore_calls_done_total"]
    assert done == [11]
    failed = {sample.labels["function"]: sample.value for sample in families["percore_function_failed"].samples}
    assert failed["tests.jobs.afail"] == 1
    assert {sample.labels["worker"] for sample in families["percore_worker_ready"].samples} == {"0", "1"}
    assert all(family.documentation for family in families.values())
    if promtool := shutil.which("promtool"):
        command = [promtool, "check", "metrics"]
        checked = await asyncio.to_thread(subprocess.run, command, input=text, capture_output=True, text=True, check=False)
        assert checked.returncode == 0, checked.stdout


async def test_a_stream_of_snapshots_ends_when_the_viewer_has_gone() -> None:
    async with percore.Runner(workers=1) as runner:
        dashboard = percore.web.dashboard(runner, interval=0.05)
        scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/events", "headers": []}
        status, headers, body = await ask(dashboard, scope, events=4)
        assert (status, headers["content-type"]) == (200, "text/event-stream")
        assert (await ask(dashboard, scope | {"method": "HEAD"}))[2] == ""
        first, *snapshots = body.strip().split("\n\n")
        assert first.startswith("retry: ")
        views = [json.loads(snapshot.removeprefix("data: "))["view"] for snapshot in snapshots]
        assert [len(view["workers"]) for view in views] == [1] * len(views)


async def test_a_worker_whose_loop_is_blocked_is_not_ready(over: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    async with percore.Runner(workers=1, blocked_after=0.1) as runner, over(percore.web.dashboard(runner)) as get:
        blocking = runner.submit(jobs.block_until, str(gate))
        await until(lambda: runner.statistics().workers[0].blocked_for)
        assert (await get("/ready"))[0] == 503
        assert (await get("/health"))[0] == 200
        await asyncio.to_thread(gate.write_text, "")
        await blocking
        await until(lambda: not runner.statistics().workers[0].blocked_for)
        assert (await get("/ready"))[0] == 200


async def test_all_viewers_share_one_reading() -> None:
    async with percore.Runner(workers=1) as runner:
        dashboard = percore.web.dashboard(runner, interval=60)
        feed = dashboard._pages._feed
        snapshots = await asyncio.gather(*(feed.snapshot() for _ in range(20)))
        assert len({*snapshots, await feed.snapshot()}) == 1


async def test_a_snapshot_of_a_program_that_makes_up_functions_without_end_stays_small() -> None:
    """The calls of those beyond the limit are gathered under one name, and each worker has the figures of few."""
    async with FakeRunner(2) as runner:
        meters = supervisor_of(runner).meters
        for number in range(2000):
            tally = meters.named(f"made.f{number}").at(number % 2)
            tally.ended += 1
            tally.run.add(number)
        view = json.loads(await percore.web.dashboard(runner)._pages._feed.snapshot())["view"]
    ended = {one["figures"]["name"]: one["figures"]["ended"] for one in view["functions"]}
    assert len(view["functions"]) == len(ended) == 1025
    assert ended["(other functions)"] == 2000 - 1024
    assert sum(ended.values()) == 2000
    assert sum(len(one["workers"]) for one in view["functions"]) == 2 * feed_module._MOST_FUNCTIONS


def test_a_loop_that_is_closed_in_the_midst_of_a_reading_keeps_no_later_one_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a server runs in loops of its own, one after the other, and cancels nothing at the end of one."""
    runner: Any = SimpleNamespace(_statistics=lambda _: Statistics(0, 0, 0, 0, 0, 0, ()))
    dashboard = percore.web.dashboard(lambda: runner)
    with monkeypatch.context() as hanging:
        hanging.setattr(feed_module, "in_thread", lambda *_: asyncio.get_running_loop().create_future())
        loop = asyncio.new_event_loop()
        asked = loop.create_task(dashboard._pages._feed.snapshot())
        loop.run_until_complete(asyncio.sleep(0))
        reading = dashboard._pages._feed._reading
        loop.close()
    tasks: list[Any] = [asked, reading]
    for task in tasks:
        task._log_destroy_pending = False
        task.get_coro().close()
    snapshot = asyncio.run(asyncio.wait_for(dashboard._pages._feed.snapshot(), 10))
    assert json.loads(snapshot)["view"]["workers"] == []


async def test_a_worker_is_recycled_by_the_page_alone(over: Any) -> None:
    async with percore.Runner(workers=1) as runner, over(percore.web.dashboard(runner, actions=True)) as get:
        assert "ACTIONS = true" in (await get("/"))[2]
        assert (await get("/recycle/0"))[0] == 405
        assert (await get("/recycle/0", "POST"))[0] == 403
        assert (await get("/recycle/0", "POST", x_percore="recycle", sec_fetch_site="cross-site"))[0] == 403
        assert (await get("/recycle/7", "POST", x_percore="recycle"))[0] == 404
        before = await runner.run(os.getpid)
        status, _, said = await get("/recycle/0", "POST", x_percore="recycle")
        assert (status, said) == (202, f"worker 0 ({before}) was asked to end\n")
        while await runner.run(os.getpid) == before:
            pass
    async with over(percore.web.dashboard(runner, actions=True)) as get:
        assert (await get("/recycle/0", "POST", x_percore="recycle"))[0] == 404


async def test_a_worker_that_ends_just_before_it_is_asked_to_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_pid: int, _signum: int) -> None:
        raise ProcessLookupError

    async with percore.Runner(workers=1) as runner:
        pages = percore.web.dashboard(runner, actions=True)._pages
        monkeypatch.setattr(os, "kill", gone)
        answer = await pages.answer(Request("POST", "/recycle/0", {"x-percore": "recycle"}))
        monkeypatch.undo()
    assert answer.status == 404


async def test_it_serves_alone_too() -> None:
    dashboard = percore.web.dashboard(lambda: percore.Runner())
    asked = iter(["lifespan.startup", "lifespan.shutdown"])
    said: list[str] = []

    async def receive() -> "dict[str, Any]":
        return {"type": next(asked)}

    async def send(message: MutableMapping[str, Any]) -> None:
        said.append(message["type"])

    await dashboard({"type": "lifespan"}, receive, send)
    assert said == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    await dashboard({"type": "websocket"}, receive, send)
    assert said[-1] == "websocket.close"


def test_what_is_no_runner_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a Runner or a function that returns one, not int"):
        percore.web.dashboard(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="positive number of seconds"):
        percore.web.dashboard(percore.Runner(), interval=0)


def test_without_prometheus_client_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['prometheus_client'] = None; import percore.web"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: percore.web needs prometheus-client: pip install percore[web]" in done.stderr
