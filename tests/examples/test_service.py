"""examples/service.py as a program: clients at load, clients that leave, a worker that is killed, and the ways it ends.

Nothing here depends on speed: the pages that the service fetches are the test's own, and it holds answers back until it wants them.
"""

import asyncio
import errno
import json
import os
import re
import runpy
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

pytest.importorskip("aiohttp")

import aiohttp
from aiohttp import web

from tests.faults import LIMIT, Watch
from tests.serving import answering, serving

SERVICE = Path(__file__).resolve().parents[2] / "examples" / "service.py"
SUMMARY = ["A worker rings its bell.", "The supervisor hears the bell of a worker.", "Nobody polls the bell of any worker."]
TEXT = f"{SUMMARY[0]} Rain falls slowly. {SUMMARY[1]} Cats sleep. {SUMMARY[2]}"

Answer = tuple[int, Any]


class Site:
    """A web site that counts who comes: /page/N answers at once, /held/N when the gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.url = ""
        self._arrived: asyncio.Queue[str] = asyncio.Queue()
        self._lost: asyncio.Queue[str] = asyncio.Queue()

    def page(self, number: int) -> str:
        return f"{self.url}/page/{number}"

    def held(self, number: int) -> str:
        return f"{self.url}/held/{number}"

    async def answer(self, request: web.Request) -> web.Response:
        if request.match_info["kind"] == "held":
            self._arrived.put_nowait(str(request.url))
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self._lost.put_nowait(str(request.url))
                raise
        return web.Response(text="x" * int(request.match_info["number"]))

    async def arrived(self, count: int) -> list[str]:
        """The next so many that wait at the gate."""
        return [await self._arrived.get() for _ in range(count)]

    async def lost(self, count: int) -> list[str]:
        """The next so many whose client has closed the connection instead of waiting."""
        return [await self._lost.get() for _ in range(count)]


@pytest_asyncio.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()
    async with serving(answering("/{kind}/{number}", site.answer)) as site.url:
        yield site


class Service:
    """The program, and a client of it."""

    def __init__(self, process: asyncio.subprocess.Process, client: aiohttp.ClientSession) -> None:
        self.process = process
        self.client = client
        self.log = ""
        self.url = ""

    async def listens(self) -> None:
        assert self.process.stdout is not None
        line = (await self.process.stdout.readline()).decode()
        told = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert told, f"it said {line!r}, and on standard error:\n{await self.rest_of_log()}"
        self.url = told[0]

    async def says(self, word: str) -> None:
        """Until it logs a line with this word."""
        assert self.process.stderr is not None
        while line := (await self.process.stderr.readline()).decode():
            self.log += line
            if word in line:
                return
        pytest.fail(f"it ended before it said {word!r}:\n{self.log}")

    async def rest_of_log(self) -> str:
        assert self.process.stderr is not None
        self.log += (await self.process.stderr.read()).decode()
        return self.log

    async def ends(self) -> int:
        """Its exit code, when it has ended and complained of nothing."""
        log = await self.rest_of_log()
        code = await self.process.wait()
        assert "Traceback" not in log, log
        return code

    def family(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.process.pid).children(recursive=True)]

    async def ask(self, path: str, *urls: str, text: str = "") -> Answer:
        """Status and body of an answer; a body that is no JSON is its text."""
        data = "\n".join(urls) or text
        async with self.client.request("POST" if data else "GET", self.url + path, data=data.encode()) as response:
            body = await response.text()
            return response.status, json.loads(body) if response.content_type == "application/json" else body

    async def statistics(self) -> dict[str, Any]:
        status, statistics = await self.ask("/statistics")
        assert status == 200
        return dict(statistics)


Start = Callable[..., AbstractAsyncContextManager[Service]]


@pytest.fixture
def start() -> Start:
    @asynccontextmanager
    async def started(*options: str) -> AsyncIterator[Service]:
        loop = "uvloop" if "uvloop" in type(asyncio.get_running_loop()).__module__ else "asyncio"
        pipe = asyncio.subprocess.PIPE
        command = [sys.executable, str(SERVICE), "--port", "0", "--loop", loop, *(options or ("--workers", "2"))]
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, start_new_session=True)
        try:
            connector = aiohttp.TCPConnector(limit=0)
            async with asyncio.timeout(2 * LIMIT), aiohttp.ClientSession(connector=connector) as client:
                service = Service(process, client)
                await service.listens()
                yield service
                if process.returncode is None:
                    process.terminate()
                    assert await service.ends() == 0
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    return started


async def test_each_endpoint_answers_and_a_stream_gives_each_page_as_it_comes(site: Site, start: Start) -> None:
    nobody = "http://127.0.0.1:9/"  # where nobody listens
    async with start() as service:
        workers = {worker["pid"] for worker in (await service.statistics())["workers"]}
        assert len(workers) == 2
        status, summary = await service.ask("/summary", text=TEXT)
        assert (status, summary["sentences"], summary["words"]) == (200, SUMMARY, 25)
        status, pages = await service.ask("/fetch", site.page(7), nobody, site.page(3))
        assert (status, [page["url"] for page in pages]) == (200, [site.page(7), nobody, site.page(3)])
        assert [page.get("size") for page in pages] == [7, None, 3]
        assert "127.0.0.1:9" in pages[1]["error"]
        assert {page["worker"] for page in pages} <= workers
        status, text = await service.ask("/usage")
        assert (status, text.split()[0]) == (200, "PID")
        assert {*workers, service.process.pid} <= set(map(int, re.findall(r"^\s*(\d+)\b", text, re.MULTILINE)))
        assert (await service.ask("/stream", text=" "))[0] == 400
        assert (await service.ask("/nothing"))[0] == 404
        urls = "\n".join([site.held(5), *(site.page(number) for number in range(1, 4))])
        async with service.client.post(f"{service.url}/stream", data=urls) as response:
            assert response.headers["Transfer-Encoding"] == "chunked"
            lines = [json.loads(await response.content.readline()) for _ in range(3)]
            assert {line["size"] for line in lines} == {1, 2, 3}
            assert await site.arrived(1) == [site.held(5)]  # the first of the input, not answered yet
            site.gate.set()
            assert json.loads(await response.content.readline())["size"] == 5
            assert await response.content.read() == b""


async def test_a_client_that_leaves_cancels_its_calls_in_the_workers(site: Site, start: Start, subtests: pytest.Subtests) -> None:
    async with start("--workers", "1") as service:
        for path in ("/fetch", "/stream"):
            with subtests.test(path):
                await leaves(path, site, service)


async def leaves(path: str, site: Site, service: Service) -> None:
    asking = asyncio.create_task(service.ask(path, *map(site.held, range(3))))
    await site.arrived(3)
    assert (await service.statistics())["running"] == 3
    asking.cancel()  # closes the client's connection
    assert sorted(await site.lost(3)) == [site.held(number) for number in range(3)]
    # The only worker has ended the three by now, and tells so before it tells what comes of this one.
    assert (await service.ask("/fetch", site.page(1)))[0] == 200
    assert (await service.statistics())["running"] == 0
    await asyncio.gather(asking, return_exceptions=True)


async def test_a_killed_worker_costs_only_the_requests_that_ran_there(site: Site, start: Start) -> None:
    async with start() as service:
        held = [asyncio.create_task(service.ask("/fetch", site.held(number))) for number in range(20)]
        await site.arrived(20)
        victim, other = (await service.statistics())["workers"]
        assert victim["running"] + other["running"] == 20
        assert victim["running"] > 0 < other["running"]

        answers: list[Answer] = []
        enough = asyncio.Event()
        clients = [asyncio.create_task(keep_asking(service, site, answers, enough)) for _ in range(12)]
        await enough.wait()
        os.kill(victim["pid"], signal.SIGKILL)
        await asyncio.gather(*clients)
        assert len(answers) == 12 * 40

        ends = asyncio.as_completed(held)
        costs = [await next(ends) for _ in range(victim["running"])]
        site.gate.set()
        fine = [await end for end in ends]
        assert {(status, body["error"]) for status, body in costs} == {(502, "WorkerDied")}
        assert {(status, body[0]["worker"]) for status, body in fine} == {(200, other["pid"])}
        failed = costs + [answer for answer in answers if answer[0] != 200]
        for status, body in failed:
            assert status == 502
            assert re.match(rf"worker \(pid {victim['pid']}\) died .*SIGKILL.* while it ran \S+ for [\d.e-]+ s", body["reason"]), (
                body
            )
        statistics = await service.statistics()
        assert (statistics["failed"], statistics["restarts"], statistics["running"]) == (len(failed), 1, 0)


async def keep_asking(service: Service, site: Site, answers: list[Answer], enough: asyncio.Event) -> None:
    """Forty requests in a row, of both kinds of work."""
    for number in range(20):
        answers.append(await service.ask("/summary", text=TEXT * 20))
        answers.append(await service.ask("/fetch", site.page(number)))
        if len(answers) >= 150:
            enough.set()


async def test_above_its_bound_it_refuses(site: Site, start: Start) -> None:
    async with start("--workers", "1", "--max-pending", "2") as service:
        held = [asyncio.create_task(service.ask("/fetch", site.held(number))) for number in range(2)]
        await site.arrived(2)
        status, body = await service.ask("/summary", text=TEXT)
        assert (status, body["error"]) == (503, "RunnerFull")
        site.gate.set()
        assert [status for status, _ in await asyncio.gather(*held)] == [200, 200]
        assert (await service.ask("/summary", text=TEXT))[0] == 200


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--port", "99999"], "argument --port: invalid port value: '99999'"),
        (["--port", "-1"], "argument --port: invalid port value: '-1'"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid, port 8080: "),
    ],
)
def test_a_bad_command_line_gets_a_sentence(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SERVICE), *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SERVICE), run_name="__main__")
    out, err = capsys.readouterr()
    assert out == ""
    assert sentence in (ended.value.code if isinstance(ended.value.code, str) else err)


@pytest.mark.asyncio_only
async def test_where_it_cannot_listen_it_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(SERVICE), "--port", str(number), stdout=pipe, stderr=pipe
        )
        told = tuple(told.decode() for told in await process.communicate())
    assert (process.returncode, *told) == (1, "", f"cannot listen on 127.0.0.1, port {number}: {os.strerror(errno.EADDRINUSE)}\n")


# Ends


@pytest.mark.parametrize("whom", ["it", "everybody"])  # docker and kubernetes tell the first process, systemd all of them
async def test_sigterm_lets_accepted_requests_finish(whom: str, site: Site, start: Start) -> None:
    async with start() as service:
        asked = [asyncio.create_task(service.ask("/fetch", site.held(number))) for number in range(8)]
        asked.append(asyncio.create_task(service.ask("/stream", site.page(1), site.held(8))))
        await site.arrived(9)
        with Watch(service.family()) as family:
            assert len(family) >= 2  # the workers, and their fork server where there is one
            (service.process.terminate if whom == "it" else lambda: os.killpg(service.process.pid, signal.SIGTERM))()
            await service.says("draining")
            with pytest.raises(aiohttp.ClientConnectorError):
                async with aiohttp.ClientSession() as newcomer, newcomer.get(service.url):
                    pass
            site.gate.set()
            assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 9
            assert len(asked[-1].result()[1].splitlines()) == 2
            assert await service.ends() == 0
            assert family.wait_gone(0) == []
        assert {"0", "1"} <= set(re.findall(r"worker (\d) has closed its session", service.log)), service.log


async def test_what_does_not_finish_is_cut_off(site: Site, start: Start) -> None:
    async with start("--workers", "1", "--drain", "0.1") as service:
        asking = asyncio.create_task(service.ask("/fetch", site.held(1)))
        await site.arrived(1)
        service.process.terminate()
        with pytest.raises(aiohttp.ClientError):
            await asking
        assert await site.lost(1) == [site.held(1)]
        assert await service.ends() == 0


async def test_a_second_sigterm_ends_it_at_once(site: Site, start: Start) -> None:
    async with start("--workers", "1") as service:
        asking = asyncio.create_task(service.ask("/fetch", site.held(1)))
        await site.arrived(1)
        with Watch(service.family()) as family:
            service.process.terminate()
            await service.says("draining")
            service.process.terminate()
            await service.rest_of_log()  # aiohttp complains there of the handlers that it cuts off; percore does not
            assert await service.process.wait() == 1
            assert "percore" not in re.sub(r'File ".*"|^INFO percore: .*$', "", service.log, flags=re.MULTILINE), service.log
            assert family.wait_gone(0) == []
        with pytest.raises(aiohttp.ClientError):
            await asking
        assert await site.lost(1) == [site.held(1)]
