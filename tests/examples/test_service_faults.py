"""examples/service.py in the test's own loop, with percore.testing: what clients are told when calls fail, die or wait."""

import argparse
import json
import runpy
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("aiohttp")

from aiohttp.test_utils import TestClient, TestServer

import percore
import percore.testing
from tests.crawling import EXAMPLES
from tests.waiting import until

pytestmark = pytest.mark.asyncio_only  # the loop under test is the program's

TEXT = "The sun is a star. The sun shines. It rained."


@pytest.fixture(scope="module")
def service() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "service.py"))


@pytest_asyncio.fixture
async def client(service: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TestClient[Any, Any]]:
    monkeypatch.setattr(percore, "Runner", percore.testing.FakeRunner)
    app = service["make_app"](argparse.Namespace(workers=2, max_pending=2))
    async with TestClient(TestServer(app)) as client:
        yield client


def runner_of(service: dict[str, Any], client: TestClient[Any, Any]) -> percore.Runner:
    app = client.app
    assert app is not None
    runner: percore.Runner = app[service["RUNNER"]]
    return runner


async def test_a_worker_that_dies_costs_its_request_alone(service: dict[str, Any], client: TestClient[Any, Any]) -> None:
    with percore.testing.losing(runner_of(service, client), service["summarize"]):
        lost = await client.post("/summary", data=TEXT)
        assert (lost.status, (await lost.json())["error"]) == (502, "WorkerDied")
        assert (await client.post("/summary", data=TEXT)).status == 200


async def test_a_page_that_fails_under_a_stream_is_told_in_its_line(service: dict[str, Any], client: TestClient[Any, Any]) -> None:
    urls = [f"http://127.0.0.1:1/{number}" for number in range(4)]
    with percore.testing.losing(runner_of(service, client), service["fetch"], times=1):
        streamed = await client.post("/stream", data="\n".join(urls))
        lines = [json.loads(line) for line in (await streamed.text()).splitlines()]
    assert streamed.status == 200
    assert sorted(line["url"] for line in lines) == urls
    died = [line["error"] for line in lines if "died" in line["error"]]
    assert died
    assert all("died by SIGKILL" in error for error in died)


async def test_a_summary_above_the_bound_is_refused_and_a_fetch_waits(
    service: dict[str, Any], client: TestClient[Any, Any]
) -> None:
    runner = runner_of(service, client)
    with percore.testing.delayed(runner, service["fetch"], seconds=3600, times=2):
        held = [runner.submit(service["fetch"], "http://127.0.0.1:1/") for _ in range(2)]
        await until(lambda: runner.statistics().running == 2)
        refused = await client.post("/summary", data=TEXT)
        assert (refused.status, (await refused.json())["error"]) == (503, "RunnerFull")
        for call in held:
            call.cancel()
    await until(lambda: runner.statistics().running == 0)
    assert (await client.post("/summary", data=TEXT)).status == 200


async def test_an_error_of_the_work_is_one_of_the_service(service: dict[str, Any], client: TestClient[Any, Any]) -> None:
    with percore.testing.failing(runner_of(service, client), service["summarize"], error=TimeoutError("too long")):
        assert (await client.post("/summary", data=TEXT)).status == 504
