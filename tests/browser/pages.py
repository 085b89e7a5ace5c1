"""The dashboard and the flame graph in a headless Chromium: `make test-browser`."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web

import percore
import percore.web
from percore._record.output import as_html
from tests.browser.chromium import CHROMIUM, Tab, browsing
from tests.unit.test_record import recording

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt install chromium"),
    pytest.mark.asyncio(loop_scope="module"),
]
INTERVAL = 0.2
PICTURES = os.environ.get("PERCORE_PICTURES")
"""A folder for the pictures of the documentation."""


async def fetch(number: int) -> int:
    await asyncio.sleep(0.05)
    return number


def parse(text: str) -> int:
    return sum(map(ord, text * 2000))


async def block(path: str) -> None:
    """Hold the loop until somebody opens this pipe."""
    with open(path):  # noqa: ASYNC230  # a worker's loop that is blocked is what is shown
        pass


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def tab() -> AsyncIterator[Tab]:
    async with browsing() as tab:
        yield tab


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def runner() -> AsyncIterator[percore.Runner]:
    """A runner that has work all the time."""

    async def work(runner: percore.Runner) -> None:
        while True:
            await asyncio.gather(runner.map(fetch, range(40)), runner.map(parse, ["spam " * 50] * 40), return_exceptions=True)

    async with percore.Runner(workers=2, blocked_after=0.5) as runner:
        working = asyncio.create_task(work(runner))
        yield runner
        working.cancel()
        await runner.aclose(grace=0)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def url(runner: percore.Runner) -> AsyncIterator[str]:
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(sys, "argv", ["crawl.py"])  # what the page calls the program
    app = web.Application()
    app.add_subapp("/percore", percore.web.dashboard(runner, actions=True, interval=INTERVAL).application())
    server = web.AppRunner(app)
    await server.setup()
    site = web.TCPSite(server, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{server.addresses[0][1]}/percore/"
    await server.cleanup()
    monkeypatch.undo()


FIGURES = "document.querySelector('main:not([hidden])') && document.querySelector('#functions tbody tr')"
CELL = "document.querySelector('#workers tbody').rows[{row}].cells[{column}].textContent"


def tile(name: str) -> str:
    return f"document.querySelector('[data-tile=\"{name}\"]').textContent"


def save(picture: bytes, name: str) -> None:
    if PICTURES:
        Path(PICTURES, name).write_bytes(picture)


@pytest.mark.parametrize(("width", "dark"), [(360, False), (360, True), (1280, False), (1280, True), (2560, False)])
async def test_figures_move_and_everything_can_be_read(tab: Tab, url: str, width: int, dark: bool) -> None:
    tab.messages.clear()
    await tab.open(url, width, dark=dark)
    await tab.until(FIGURES)
    done = await tab.value(tile("done"))
    await tab.until(f"{tile('done')} !== '{done}'")
    await tab.until("document.querySelectorAll('#stream rect').length > 5")
    ratio, text = await tab.contrast()
    assert ratio >= 4.5, text
    assert await tab.value("document.documentElement.scrollWidth <= innerWidth")  # wide tables scroll in their section
    assert await tab.value("window.shifts ?? 0") < 0.01
    assert await tab.value("performance.getEntriesByType('resource').every(one => one.name.endsWith('/events'))")
    assert tab.messages == []
    await asyncio.sleep(20 if PICTURES and width in (360, 1280) else 0)
    save(await tab.picture(), f"dashboard-{width}{'-dark' if dark else ''}.png")


async def test_the_streams_end_and_go_on_unseen(tab: Tab, url: str) -> None:
    await tab.open(url, 1280)
    await tab.until(FIGURES)
    await tab.until("performance.getEntriesByType('resource').filter(one => one.name.endsWith('/events')).length > 1")
    done = await tab.value(tile("done"))
    await tab.until(f"{tile('done')} !== '{done}'")
    assert await tab.value("document.querySelector('#state').textContent") != "the program does not answer"
    assert tab.messages == []


SAYS = "document.querySelector('#state').textContent"


async def test_a_stream_that_falls_silent_or_was_refused_is_opened_again(tab: Tab, url: str) -> None:
    """As of a program that was stopped or whose network is gone, and as when a server between has answered with an error."""
    await tab.open(url, 1280)
    await tab.until(FIGURES)
    # What the page says is recorded: the next stream may answer before anybody looks.
    await tab.value("new MutationObserver(() => said.add($('state').textContent)).observe($('state'), {childList: true})")
    for break_off in ("source.onmessage = null, heard -= 60000", "source.close()"):
        await tab.value(f"window.said = new Set(), {break_off}")
        await tab.until("said.has('the program does not answer')")
        done = await tab.value(tile("done"))
        await tab.until(f"{SAYS} !== 'the program does not answer' && {tile('done')} !== '{done}'")
    assert tab.messages == []


async def test_a_thousand_workers_and_another_clock(tab: Tab, url: str) -> None:
    """What is drawn and kept has a bound. Nothing is left of a program when another one, with its own clock, has its place."""
    await tab.open(url, 1280)
    await tab.until(FIGURES)
    await tab.value("source.onmessage = null, heard += 1e9")
    await tab.value("""
        const [one] = latest.workers, view = latest;
        const current = at => [...Array(16).keys()].map(number => ({id: 16 * at + number, name: "jobs.<b>call</b>", seconds: 0.1}));
        const many = at => [...Array(1000).keys()].map(index => ({...one, figures: {...one.figures, index, current: current(at)}}));
        for (let at = 1e9; at < 1e9 + 6; at++) show({at, view: {...view, workers: many(at)}});
    """)
    rects = "document.querySelectorAll('#stream rect').length"
    assert await tab.value("seen.size") == await tab.value(rects) == 4000
    assert await tab.value("document.querySelectorAll('#stream svg > text').length") == 64
    assert await tab.value("document.querySelector('#stream h2').textContent") == (
        "Calls of the last minute, by worker (the first 64 workers)"
    )
    assert await tab.value("document.querySelector('#workers tbody').rows.length") == 1000
    assert await tab.value("document.querySelectorAll('b:not([data-tile])').length") == 0
    await tab.value("last = 1e9 + 5, listen()")
    await tab.until(f"last < 1e9 && seen.size < 200 && {rects} < 200")
    assert tab.messages == []


async def test_a_killed_worker_shows_as_restarted(tab: Tab, url: str, runner: percore.Runner) -> None:
    await tab.open(url, 1280)
    await tab.until(FIGURES)
    pid = runner.statistics().workers[0].pid
    assert pid is not None
    assert await tab.value(CELL.format(row=0, column=1)) == str(pid)
    before = int(await tab.value(tile("restarts")))
    os.kill(pid, signal.SIGKILL)
    await tab.until(f"Number({tile('restarts')}) > {before}")
    await tab.until(f"{CELL.format(row=0, column=2)} === 'ready' && {CELL.format(row=0, column=1)} !== '{pid}'")


async def test_functions_are_shown_by_worker(tab: Tab, url: str) -> None:
    await tab.open(url, 1280)
    await tab.until(FIGURES)
    await tab.value("document.querySelector('#parts').focus()")
    await tab.press("Enter", 13, "\r")
    parts = "[...document.querySelectorAll('#functions tr.part td:first-child')].map(one => one.textContent).sort().join()"
    await tab.until(f"{parts} === 'worker 0,worker 0,worker 1,worker 1'")
    ratio, text = await tab.contrast()
    assert ratio >= 4.5, text
    save(await tab.picture(), "dashboard-by-worker.png")
    await tab.press("Enter", 13, "\r")
    await tab.until("!document.querySelector('#functions tr.part')")


async def test_workers_are_grouped_by_node(tab: Tab, url: str) -> None:
    await tab.open(url, 1280)
    await tab.until(FIGURES)
    heads = "[...document.querySelectorAll('#workers tr.node')].map(one => one.textContent.split(',')[0]).join()"
    await tab.value(
        "source.close(), show({at: 1, view: {...latest, workers: latest.workers.map((one, at) => ({...one, node: 'ba'[at]}))}})"
    )
    assert await tab.value(heads) == "node a: 1 worker,node b: 1 worker"
    assert await tab.value(CELL.format(row=1, column=0)) == "1"
    ratio, text = await tab.contrast()
    assert ratio >= 4.5, text
    save(await tab.picture(), "dashboard-nodes.png")
    await tab.value("show({at: 2, view: latest = {...latest, workers: latest.workers.map(one => ({...one, node: ''}))}})")
    assert await tab.value(heads) == ""


async def test_a_blocked_loop_is_red(tab: Tab, url: str, runner: percore.Runner, tmp_path: Path) -> None:
    await tab.open(url, 1280)
    await tab.until(FIGURES)
    go = tmp_path / "go"
    os.mkfifo(go)
    blocking = runner.submit(block, str(go))
    await tab.until("document.querySelector('#workers tr.bad')")
    assert "is blocked" in await tab.value("document.querySelector('#state').textContent")
    red = await tab.value("getComputedStyle(document.querySelector('#workers tr.bad td')).color")
    assert red == "rgb(176, 0, 32)"
    ratio, text = await tab.contrast()
    assert ratio >= 4.5, text
    save(await tab.picture(), "dashboard-blocked.png")
    await asyncio.to_thread(go.write_text, "")
    await blocking
    await tab.until("!document.querySelector('#workers tr.bad')")


async def test_a_worker_is_recycled_by_keyboard_alone(tab: Tab, url: str, runner: percore.Runner) -> None:
    await tab.open(url, 1280)
    await tab.until(FIGURES)
    pid = runner.statistics().workers[0].pid
    for _ in range(20):
        await tab.press("Tab", 9)
        if await tab.value("document.activeElement.textContent") == "recycle":
            break
    await tab.press("Enter", 13, "\r")
    await tab.until(f"document.querySelector('#said').textContent.includes('({pid}) was asked to end')")
    await tab.until(f"{CELL.format(row=0, column=1)} !== '{pid}' && {CELL.format(row=0, column=2)} === 'ready'")


@pytest.mark.parametrize("dark", [False, True])
async def test_the_flame_graph(tab: Tab, tmp_path: Path, dark: bool) -> None:
    page = tmp_path / "out.html"
    page.write_text(as_html(recording()))
    tab.messages.clear()
    await tab.open(page.as_uri(), 1000, dark=dark)
    frames = "[...document.querySelectorAll('#graph button')].map(one => one.textContent)"
    await tab.until(f"{frames}.length > 5")
    assert "__main__.fetch" in await tab.value(frames)
    ratio, text = await tab.contrast()
    assert ratio >= 4.5, text
    await tab.value("document.querySelector('#graph button').focus()")
    await tab.press("ArrowDown", 40)
    assert await tab.value("document.activeElement.textContent") == "__main__.fetch"
    await tab.press("Enter", 13, "\r")
    await tab.until(f"!{frames}.includes('__main__.parse')")
    await tab.press("Escape", 27)
    await tab.until(f"{frames}.includes('__main__.parse')")
    await tab.value("document.querySelector('#worker').click()")
    assert (await tab.value(frames))[1] == "worker 1"
    assert tab.messages == []
