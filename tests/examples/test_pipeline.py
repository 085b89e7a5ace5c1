"""examples/pipeline.py as a program: what it writes, and what memory it takes for ten times the pages."""

import asyncio
import json
import os
import re
import runpy
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("aiohttp")
pytest.importorskip("selectolax")

from aiohttp import web

import percore
import percore.testing
from tests.counts import times
from tests.crawling import EXAMPLES
from tests.rows import repeated_rows
from tests.serving import answering, serving
from tests.terminals import shown_at_terminal

import pipeline  # isort: skip

pytestmark = pytest.mark.asyncio_only  # the loop under test is the program's, which is always the same

ALONE = [sys.executable, str(EXAMPLES / "pipeline.py"), "--workers", "1"]
PIPELINE = [*ALONE[:-1], "2"]
FILLING = "lorem ipsum dolor " * 450  # 8 kB
LONG_PAGE = 3 * FILLING
SHORT, LONG = times(100, 200), times(1000, 2000)  # pages of 24 kB
FULL = Path("/dev/full")
GROWTH = 16 << 20
"""Bytes by which the long run may lift the peak of the short one: the pages that it reads besides come to 22 MB, or twice that."""

Line = dict[str, Any]

# Runs the program and tells the peak of its memory. Not by getrusage: what that tells begins with the memory of the parent.
MEASURED = """\
import re, sys
from pathlib import Path
import pipeline
code = pipeline.main()
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024)
sys.exit(code)
"""


class Site:
    """Page N is called "Page N" and has its filling and a word more; every seventh is missing. Answers wait for the gate."""

    def __init__(self) -> None:
        self.url = ""
        self.filling = FILLING
        self.gate = asyncio.Event()
        self.gate.set()
        self._asked: asyncio.Queue[int] = asyncio.Queue()

    async def answer(self, request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        self._asked.put_nowait(number)
        await self.gate.wait()
        if number % 7 == 0:
            raise web.HTTPNotFound
        html = f"<html><head><title>Page {number}</title></head><body><p>{self.filling}</p><p>{number}</p></body></html>"
        return web.Response(text=html, content_type="text/html")

    async def asked(self, count: int) -> None:
        """Until so many more have been asked for."""
        for _ in range(count):
            await self._asked.get()

    def urls(self, count: int, path: Path) -> Path:
        """A file with the addresses of so many pages."""
        path.write_text("# pages\n\n" + "".join(f"{self.url}/{number}\n" for number in range(1, count + 1)))
        return path

    def lines(self, count: int) -> list[Line]:
        """What the pipeline has to write of them."""
        return [self._line(number) for number in range(1, count + 1)]

    def _line(self, number: int) -> Line:
        line: Line = {"url": f"{self.url}/{number}", "title": f"Page {number}", "words": len(self.filling.split()) + 1, "error": ""}
        line["most_frequent"] = ["lorem", "ipsum", "dolor"]
        if number % 7 == 0:
            line |= {"title": "", "words": 0, "most_frequent": [], "error": "HTTP 404"}
        return line


@pytest_asyncio.fixture
async def site() -> AsyncIterator[Site]:
    site = Site()
    async with serving(answering("/{number}", site.answer)) as site.url:
        yield site


@asynccontextmanager
async def started(*command: str | Path, stdout: int | None = None) -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    out = pipe if stdout is None else stdout
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLES), os.environ.get("PYTHONPATH", "")])}
    process = await asyncio.create_subprocess_exec(*map(str, command), stdout=out, stderr=pipe, env=environment)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def output_of(*command: str | Path) -> tuple[str, str]:
    """What a program that ends well prints on its two outputs."""
    async with started(*command) as process:
        out, err = (told.decode() for told in await process.communicate())
        assert process.returncode == 0, err
        return out, err


def lines_in(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_a_line_for_each_page_in_the_order_of_the_input(site: Site, tmp_path: Path) -> None:
    written = tmp_path / "pages.jsonl"
    out, err = await output_of(*PIPELINE, "--input", site.urls(50, tmp_path / "urls"), "--output", written)
    assert lines_in(written) == site.lines(50)
    assert out == ""
    assert re.fullmatch(r"50 pages in [\d.]+ s, 7 of them failed\n", err)


async def test_without_a_file_the_lines_go_to_standard_output(site: Site, tmp_path: Path) -> None:
    out, err = await output_of(*ALONE, "--input", site.urls(20, tmp_path / "urls"))
    assert [json.loads(line) for line in out.splitlines()] == site.lines(20)
    assert err[:12] == "20 pages in "


@pytest.mark.full  # a map holds its window in tests/contract; what a run of 1,000 pages adds is the example's own
@pytest.mark.long
@pytest.mark.timeout(120)
async def test_ten_times_the_pages_take_the_same_memory(site: Site, tmp_path: Path) -> None:
    peaks = []
    site.filling = LONG_PAGE
    for count in (SHORT, LONG):
        written = tmp_path / f"{count}.jsonl"
        urls = site.urls(count, tmp_path / f"{count}.txt")
        out, _ = await output_of(sys.executable, "-c", MEASURED, "--workers", "2", "--input", urls, "--output", written)
        peaks.append(int(out))
        assert lines_in(written) == site.lines(count)
    assert peaks[1] - peaks[0] <= GROWTH, peaks


class LosingRunner(percore.testing.FakeRunner):
    """Its workers die when they have done the work of the first call of each stage, and with them the calls beside those."""

    async def start(self) -> None:
        await super().start()
        self._losses = ExitStack()
        for stage in (pipeline.fetch, pipeline.parse):
            self._losses.enter_context(percore.testing.losing(self, stage, times=1))

    async def aclose(self, *, grace: float | None = None) -> None:
        self._losses.close()
        await super().aclose(grace=grace)


async def test_workers_that_die_cost_no_line(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(percore, "Runner", LosingRunner)
    written = tmp_path / "pages.jsonl"
    with pipeline.Output(written) as output:
        urls = pipeline.urls_of_file(site.urls(100, tmp_path / "urls").read_text().splitlines())
        await pipeline.run_pipeline(urls, output, pipeline.Progress(None), workers=2)
    assert "died by SIGKILL" in caplog.text
    assert lines_in(written) == site.lines(100)


async def test_ctrl_c_keeps_what_it_has(site: Site, tmp_path: Path) -> None:
    written = tmp_path / "pages.jsonl"
    async with started(*PIPELINE, "--input", site.urls(600, tmp_path / "urls"), "--output", written) as process:
        await site.asked(300)
        site.gate.clear()
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
        assert (process.returncode, err.decode()) == (130, "")
    lines = lines_in(written)
    assert lines == site.lines(600)[: len(lines)]


@pytest.mark.skipif(not FULL.exists(), reason="this system has no full disk")
@pytest.mark.parametrize(  # one line is written when the output is left, many are before
    ("is_file", "count"),
    [(True, 1), *repeated_rows((False, 200), (True, 200), (False, 1))],
)
async def test_a_full_disk_gets_a_sentence(is_file: bool, count: int, site: Site, tmp_path: Path) -> None:
    urls = site.urls(count, tmp_path / "urls")
    output = ["--output", str(FULL)] if is_file else []
    full = os.open(FULL, os.O_WRONLY)
    try:
        async with started(*ALONE, "--input", urls, *output, stdout=None if is_file else full) as process:
            _, err = await process.communicate()
    finally:
        os.close(full)
    name = str(FULL) if is_file else "standard output"
    assert (process.returncode, err.decode()) == (1, f"cannot write {name}: No space left on device\n")


@pytest.mark.parametrize(("numbers", "code"), [([7, 14], 1), *repeated_rows(([], 0))], ids=["all", "no page"])
async def test_it_fails_where_every_page_does(numbers: list[int], code: int, site: Site, tmp_path: Path) -> None:
    urls = tmp_path / "urls"
    urls.write_text("".join(f"{site.url}/{number}\n" for number in numbers))
    async with started(*ALONE, "--input", urls, "--output", tmp_path / "pages.jsonl") as process:
        _, err = await process.communicate()
    failed = sum(number % 7 == 0 for number in numbers)
    said = f", {failed} of them failed" if failed else ""
    assert re.fullmatch(rf"{len(numbers)} pages in [\d.]+ s{said}\n", err.decode())
    assert process.returncode == code


def test_without_a_list_it_reads_the_farm_and_at_a_terminal_it_says_how_far_it_is(tmp_path: Path) -> None:
    written = tmp_path / "pages.jsonl"
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES)}
    code, shown = shown_at_terminal([*PIPELINE, "150", "--output", str(written)], environment)
    assert code == 0
    line = r"\r\x1b\[K\d+ pages in [\d.]+ s \.\.\."
    assert re.fullmatch(rf"\r\x1b\[K0 pages in 0\.0 s \.\.\.({line})*\r\x1b\[K150 pages in [\d.]+ s\r\n", shown), shown
    lines = lines_in(written)
    assert len({line["url"] for line in lines}) == len(lines) == 150
    # Every site of the farm in turn, module after module: those that a site does not keep are redirected to a neighbour.
    assert [line["title"] for line in lines] == ["Python: abc"] * 64 + ["Python: argparse"] * 64 + ["Python: base64"] * 22
    assert all(line["words"] > 100 and not line["error"] for line in lines)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["--input", "/nonexistent"], "cannot open /nonexistent: No such file or directory", ""),
        (["--workers", "0"], 2, "argument --workers: invalid whole value"),
    ],
)
def test_a_bad_command_line_gets_a_sentence(
    arguments: list[str], code: int | str, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [*PIPELINE[1:], *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(PIPELINE[1], run_name="__main__")
    assert ended.value.code == code
    assert sentence in capsys.readouterr().err
