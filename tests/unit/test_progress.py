"""Progress: its figures and its line, and the choice among the displays and what they write."""

import inspect
import io
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib import import_module
from itertools import count
from typing import Any, ClassVar

import pytest

from percore import Map, Progress
from percore._map import displays
from percore._map.displays import Bar, Line, Lines, RichBar, automatic, choose
from percore._map.progress import Meter, check, display_of, seconds_left
from percore._monitor.progress import duration
from tests.fakes import FakeRunner
from tests.internals import supervisor_of


def progress(done: int = 0, total: int | None = 200, **more: Any) -> Progress:
    given: dict[str, Any] = {"failed": 0, "pulled": done, "seconds": 2.0, "rate": 50.0, "eta": 3.0, "busy": 1, "workers": 2}
    return Progress(function="fetch", done=done, total=total, **given | {"is_over": False} | more)


class TestMeter:
    def test_knows_nothing_before_time_has_passed(self) -> None:
        assert Meter(5.0).rate(5.0, 7) is None

    def test_counts_from_the_beginning_at_first(self) -> None:
        meter = Meter(0.0)
        assert meter.rate(2.0, 10) == 5
        assert meter.rate(4.0, 40) == 10

    def test_forgets_what_is_long_ago(self) -> None:
        meter = Meter(0.0)
        for second in range(1, 21):
            rate = meter.rate(float(second), 1000 if second <= 5 else 1000 + 2 * (second - 5))
        assert rate == 2  # the thousand of the first second is forgotten

    def test_a_rare_reading_counts_all_the_time_since_the_one_before(self) -> None:
        meter = Meter(0.0)
        meter.rate(60.0, 60)
        assert meter.rate(120.0, 180) == 2

    def test_two_readings_at_one_time(self) -> None:
        meter = Meter(0.0)
        assert [meter.rate(1.0, 5), meter.rate(1.0, 6)] == [5, 6]


def test_how_long_the_rest_takes() -> None:
    assert seconds_left(50, 100, 10.0) == 5
    assert seconds_left(100, 100, 10.0) == 0
    assert [seconds_left(*known) for known in ((1, None, 1.0), (1, 2, None), (1, 2, 0.0), (3, 2, 1.0))] == [None] * 4


def test_durations_in_words() -> None:
    told = {0.04: "0.0 s", 9.94: "9.9 s", 12.4: "12 s", 59.6: "1:00 min", 185: "3:05 min", 7209: "2:00:09 h"}
    assert {seconds: duration(seconds) for seconds in told} == told


def test_the_line(subtests: pytest.Subtests) -> None:
    lines = {
        "fetch: 50 of 200 (25 %), 50.0/s, 3.0 s left, 1 of 2 workers busy": progress(50),
        "fetch: 50 of 200 (25 %), 3 failed, 1,234/s, 1 of 2 workers busy": progress(50, failed=3, rate=1234.4, eta=None),
        "fetch: 50, 50.0/s, 1 of 2 workers busy": progress(50, None, eta=None),
        "fetch: 0 of 200 (0 %), 1 of 2 workers busy": progress(rate=None, eta=None),
        "fetch: 200 of 200 (100 %) in 2.0 s, 1 failed, 100/s": progress(200, failed=1, is_over=True),
        "fetch: 0 of 0 in 0.0 s": progress(0, 0, seconds=0.0, is_over=True),
    }
    for line, shown in lines.items():
        with subtests.test(line=line):
            assert str(shown) == line


def test_what_may_be_asked_for() -> None:
    for wanted in (None, True, False, "text", print):
        check(wanted)
    with pytest.raises(ValueError, match="not 'bar'"):
        check("bar")
    with pytest.raises(TypeError, match="not 3"):
        check(3)

    async def later(_: Progress) -> None: ...

    with pytest.raises(TypeError, match="must be a plain function"):
        check(later)
    assert display_of(None) is display_of(False) is None
    assert isinstance(display_of("text"), Lines)


def test_each_place_has_its_display() -> None:
    def chosen(has: str, *, is_notebook: bool = False, is_terminal: bool = False) -> str:
        return choose(is_notebook=is_notebook, is_terminal=is_terminal, has=has.split().__contains__)

    assert chosen("rich tqdm", is_notebook=True) == "tqdm"
    assert chosen("rich", is_notebook=True) == "lines"
    assert [chosen(has, is_terminal=True) for has in ("rich tqdm", "tqdm", "")] == ["rich", "tqdm", "line"]
    assert chosen("rich tqdm") == "lines"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def terminal() -> Iterator[Terminal]:
    """Let standard error be a terminal. (pytest replaces it between a fixture and its test.)"""
    shown = Terminal()
    with redirect_stderr(shown):
        yield shown


def test_without_a_terminal_it_writes_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    display = automatic()
    assert isinstance(display, Lines)
    assert display.seconds == 60
    display.show(progress(0, seconds=0.0))  # says nothing
    display.show(progress(50, seconds=60.0))
    display.show(progress(200, is_over=True))
    assert written.getvalue().splitlines() == [str(progress(50)), str(progress(200, is_over=True))]


def test_a_program_without_standard_error_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    display = automatic()
    assert isinstance(display, Lines)
    display.show(progress(200, is_over=True))


def test_a_line_covers_the_one_before() -> None:
    line = Line()
    with terminal() as shown:
        line.show(progress(50, failed=3))
        line.show(progress(200, is_over=True))
    longer, shorter = str(progress(50, failed=3)), str(progress(200, is_over=True))
    assert shown.getvalue() == f"\r{longer}\r{shorter.ljust(len(longer))}\n"


def test_tqdm() -> None:
    # Its own lock is one of multiprocessing, which from Python 3.14 on keeps a process for it until the interpreter ends.
    import_module("tqdm.auto").tqdm.set_lock(threading.RLock())
    bar = Bar()
    with terminal() as shown:
        bar.show(progress(0))
        bar.show(progress(50, failed=3))
        bar.show(progress(200, failed=3, is_over=True))
    last = shown.getvalue().split("\r")[-1]
    assert "fetch: 100%" in last
    assert "200/200" in last
    assert "3 failed" in last


def test_a_map_may_end_while_another_one_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A garbage collection ends a map that nobody refers to, at any moment and in any thread."""
    with terminal():
        one, other = RichBar(), RichBar()
        one.show(progress(1))
        other.show(progress(1))
        refresh, garbage = RichBar._shared.refresh, [other]

        def refreshed() -> None:
            if garbage:
                garbage.pop().show(progress(2, is_over=True))
            refresh()

        monkeypatch.setattr(RichBar._shared, "refresh", refreshed)
        one.show(progress(2))
        assert (garbage, RichBar._maps) == ([], 1)
        one.show(progress(3, is_over=True))
    assert RichBar._shared is None


def test_rich_shows_all_maps_at_once() -> None:
    with terminal() as shown:
        assert isinstance(automatic(), RichBar)
        one, other = RichBar(), RichBar()
        one.show(progress(50))
        other.show(progress(7, None))
        assert RichBar._maps == 2
        one.show(progress(200, failed=3, is_over=True))
        other.show(progress(9, None, is_over=True))
    assert RichBar._maps == 0
    assert RichBar._shared is None
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.getvalue())
    assert "200/200" in text
    assert "9/9" in text
    assert "3 failed" in text


def test_a_notebook_is_known_by_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shell:
        config: ClassVar[dict[str, Any]] = {"IPKernelApp": {}}

    class IPython:
        get_ipython = staticmethod(lambda: Shell)

    monkeypatch.setitem(sys.modules, "IPython", IPython)
    assert displays._is_notebook()
    assert isinstance(automatic(), Bar)
    monkeypatch.setattr(Shell, "config", {})
    assert not displays._is_notebook()
    monkeypatch.setattr(IPython, "get_ipython", lambda: None)
    assert not displays._is_notebook()


class Interrupt(BaseException):
    """As a Ctrl-C."""


async def first_of(mapped: Map[int]) -> None:
    async with mapped:
        await anext(mapped)


@pytest.mark.parametrize("at_end", [False, True])
async def test_a_callback_that_is_interrupted_leaves_no_map_open(at_end: bool) -> None:
    def interrupted(seen: Progress) -> None:
        if seen.is_over == at_end:
            raise Interrupt

    async with FakeRunner(1, max_pending=2) as runner:
        for is_list in (True, False):
            numbers = (number for number in (range(3) if is_list else count()))
            mapped = runner.map(abs, numbers, progress=interrupted)
            with pytest.raises(Interrupt):
                await (mapped if is_list else first_of(mapped))
            assert not supervisor_of(runner).closing.enders
            assert inspect.getgeneratorstate(numbers) == inspect.GEN_CLOSED
        assert await runner.map(abs, range(3)) == [0, 1, 2]  # no place under `max_pending` is lost
