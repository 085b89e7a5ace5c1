"""What `percore top` makes of pages: rates, blocked programs, and tables for any terminal."""

import copy
import io
import os
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from rich.console import Console

from percore._attach.programs import Program
from percore._monitor.usage import ThreadsMeter, ThreadsUsage
from percore._monitor.views import LATE, Model, Worker
from percore._top import top
from percore._top.screen import draw, orders, rate

WORKER: dict[str, Any] = {
    "index": 0,
    "generation": 1,
    "pid": os.getpid(),
    "state": "ready",
    "running": 1,
    "queued": 0,
    "done": 10,
    "failed": 1,
    "retried": 0,
    "started_at": 0.0,
    "loop_lag": 0.001,
    "blocked_for": 0.0,
    "bytes_in": 1000,
    "bytes_out": 500,
    "restarts": 0,
    "restarts_for_memory": 0,
    "memory": None,
    "current": [{"name": "crawl.fetch", "seconds": 1.5}],
    "run": None,
    "node": None,
    "functions": [
        {"name": "crawl.fetch", "running": 1, "ended": 10, "failed": 1, "run": {"count": 10, "p50": 0.25, "p90": 0.5, "p99": 0.75}}
    ],
    "given_up": 0,
}
FUNCTION: dict[str, Any] = {
    "name": "crawl.fetch",
    "begun": 11,
    "ended": 10,
    "failed": 1,
    "running": 1,
    "wait": None,
    "payload": None,
    "pickling": {},
    "run": {"count": 10, "p50": 0.001, "p90": 0.002, "p99": 0.003},
    "advice": "share it",
}


def page(at: float, *, done: int = 10, due: float | None = None, number: int = 1, **worker: Any) -> dict[str, Any]:
    statistics = {
        "running": 1,
        "queued": 0,
        "done": done,
        "failed": 1,
        "retried": 0,
        "restarts": 0,
        "workers": [{**WORKER, "done": done, **worker}],
        "functions": [{**FUNCTION, "ended": done}],
    }
    return copy.deepcopy(
        {"pid": os.getpid(), "number": number, "program": "crawl.py", "at": at, "due": due, "statistics": statistics}
    )


def text(view: Any, width: int, order: str = "", *, by_worker: bool = False) -> str:
    console = Console(width=width, color_system=None, record=True, file=open(os.devnull, "w"))  # noqa: SIM115  # below
    with console.file:
        console.print(draw(view, width, order, by_worker=by_worker))
        return console.export_text()


def test_rates_count_from_the_page_before() -> None:
    model, now = Model(os.getpid()), time.monotonic()
    first = model.view([page(now)])
    assert (first.calls, first.workers[0].calls, first.functions[0].calls) == (None, None, None)
    for _ in range(2):  # a page that is read twice keeps its rates
        second = model.view([page(now + 0.5, done=60, bytes_in=2000)])
        assert second.calls == second.functions[0].calls == pytest.approx(100)
        assert second.workers[0].bytes == pytest.approx(2000)


def test_runners_that_have_closed_are_forgotten() -> None:
    """A program that is watched for weeks may make a runner for each job."""
    model = Model(os.getpid())
    for number in range(1, 50):
        model.view([page(float(number), number=number), page(number + 0.5, number=number + 1)])
    assert max(len(model._before), len(model._shown)) == 2
    assert model.view([page(60.0, done=30, due=1e9, number=50)]).calls == pytest.approx(20 / 10.5)


def test_a_new_worker_of_a_slot_has_no_rate_of_bytes_yet() -> None:
    model, now = Model(os.getpid()), time.monotonic()
    model.view([page(now)])
    view = model.view([page(now + 0.5, generation=2, bytes_in=5, bytes_out=5)])
    assert view.workers[0].bytes is None


def test_a_runner_at_rest_is_not_blocked_and_ends_no_calls() -> None:
    model, now = Model(os.getpid()), time.monotonic() - 10 * LATE
    model.view([page(now)])
    view = model.view([page(now + 0.5, done=60)])
    assert (view.blocked_for, view.calls) == (0, 0)


def test_a_program_whose_page_is_overdue_is_blocked() -> None:
    at = time.monotonic() - 2 * LATE
    view = Model(os.getpid()).view([page(at, due=at + 0.5)])
    assert view.blocked_for >= 2 * LATE
    assert "the program's event loop has been blocked for" in text(view, 80)


def test_runners_of_one_program_are_shown_together() -> None:
    view = Model(os.getpid()).view([page(1.0), page(1.0, number=2)])
    assert [worker.runner for worker in view.workers] == [1, 2]
    assert view.totals["done"] == 20


@pytest.mark.parametrize("width", [20, 40, 80, 132, 300])
def test_every_width_shows_the_workers_and_functions(width: int) -> None:
    shown = text(Model(os.getpid()).view([page(1.0)]), width)
    assert all(len(line) <= width for line in shown.splitlines())
    assert "calls/s" in shown
    if width >= 80:
        assert "fetch 1.5 s" in shown
        assert "crawl.fetch: share it" in shown


def test_a_function_is_shown_by_worker() -> None:
    model, now = Model(os.getpid()), time.monotonic()
    model.view([page(now)])
    later = page(now + 0.5, done=60)
    later["statistics"]["workers"][0]["functions"][0]["ended"] = 35
    view = model.view([later])
    (share,) = view.functions[0].workers
    assert share.worker == 0
    assert share.calls == pytest.approx(50)
    (line,) = [line for line in text(view, 132, by_worker=True).splitlines() if line.startswith("  worker 0")]
    assert [*map(line.split().__contains__, ("35", "50.0", "250.0"))] == [True] * 3
    assert "  worker 0" not in text(view, 132)


def on_nodes(*nodes: str | None) -> Any:
    one = page(1.0)
    one["statistics"]["workers"] = [{**WORKER, "index": index, "node": node} for index, node in enumerate(nodes)]
    return Model(os.getpid()).view([one])


def test_workers_are_grouped_by_node() -> None:
    view = on_nodes("b", "a", "a")
    assert [worker.usage for worker in view.workers] == [None] * 3  # their pids are those of other machines
    for width in (40, 132):
        lines = text(view, width).splitlines()
        heads = [line for line in lines if line.startswith("node ")]
        assert [head.split()[1:3] for head in heads] == [["a", "2"], ["b", "1"]]
        assert [line.split()[0] for line in lines[lines.index(heads[0]) + 2 :][:2]] == ["1", "2"]
    first, second = (line for line in text(view, 132).splitlines() if line.startswith("worker "))
    assert first == second  # the columns are equal
    assert "  b worker 0" in text(view, 132, by_worker=True)
    assert "node a" not in text(on_nodes("a", "a"), 132)
    assert "this machine" in text(on_nodes("a", None), 132)


def test_what_a_worker_on_a_node_uses_is_what_the_page_says() -> None:
    one = page(1.0, node="a")
    used = {"pid": os.getpid(), "rss": 7 << 20, "uss": None, "cpu": 50.0, "threads": 3}
    one["elsewhere"] = [{**used, "role": "host a"}, {**used, "role": "worker 0", "rss": 9 << 20}]
    (worker,) = Model(os.getpid()).view([one]).workers
    assert worker.usage is not None
    assert (worker.usage.cpu, getattr(worker.usage, "rss", 0)) == (50.0, 9 << 20)
    one["elsewhere"][1]["pid"] = 1  # that of a worker before it
    assert Model(os.getpid()).view([one]).workers[0].usage is None


def test_what_runs_on_another_node_is_not_asked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "recycle", lambda _: pytest.fail("a process of this machine with the same pid would be asked to end"))
    screen = top._Screen(Console(file=io.StringIO()), Model(os.getpid()), 1.0)
    screen._pressed("r")
    for key in "0\n":
        screen._choose(key, on_nodes("a"), cast("Any", None))
    assert "worker 0 is on node a" in screen._hint


def test_a_page_of_an_earlier_version_is_shown() -> None:
    one = page(1.0)
    for name in ("node", "functions"):
        del one["statistics"]["workers"][0][name]
    assert "crawl.fetch" in text(Model(os.getpid()).view([one]), 132, by_worker=True)


def test_a_blocked_worker_is_told() -> None:
    view = Model(os.getpid()).view([page(1.0, blocked_for=3.0, blocked_by="crawl.pages.parse")])
    assert "blocked 3 s by parse" in text(view, 120), "and not its longest call"


def test_rows_are_sorted_by_every_heading() -> None:
    view = Model(os.getpid()).view([page(1.0), page(1.0, number=2, running=7777)])
    for order in orders():
        assert f"{order}*" in text(view, 300, order)
    lines = [line for line in text(view, 300, "run").splitlines() if " ready " in line]
    assert ["7777" in line for line in lines] == [True, False]


def test_a_name_is_no_markup() -> None:
    one = page(1.0)
    one["program"] = "[red]crawl[/red].py"
    assert "[red]crawl[/red].py" in text(Model(os.getpid()).view([one]), 132)


def test_a_name_does_not_reach_the_terminal_as_a_command() -> None:
    one = page(1.0)
    one["program"] = "\x1b[2J"
    one["statistics"]["functions"][0]["name"] = "\x1b]0;title\x07"
    shown = text(Model(os.getpid()).view([one]), 132)
    assert "\x1b" not in shown
    assert "]0;title" in shown


def test_of_two_runners_a_worker_is_chosen_by_its_pid(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def recycle(worker: Worker) -> str:
        asked.append((worker.runner, worker.figures["pid"]))
        return "asked"

    monkeypatch.setattr(top, "recycle", recycle)
    view = Model(os.getpid()).view([page(1.0, pid=4_000_001), page(1.0, number=2, pid=4_000_002)])
    screen = top._Screen(Console(file=io.StringIO()), Model(os.getpid()), 1.0)
    for typed in ("0\n", "4000002\n"):
        screen._pressed("r")
        for key in typed:
            screen._choose(key, view, cast("Any", None))
    assert asked == [(2, 4_000_002)]


def test_a_worker_that_is_a_thread_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "recycle", pytest.fail)
    view = Model(os.getpid()).view([page(1.0, pid=None, thread_ids=[threading.get_native_id()])])
    assert view.workers[0].usage == ThreadsUsage(None, 1)  # nobody knows for how long it has used how much
    screen = top._Screen(Console(file=io.StringIO()), Model(os.getpid()), 1.0)
    screen._pressed("r")
    for key in "0\n":
        screen._choose(key, view, cast("Any", None))
    assert screen._hint == "worker 0 is a thread of the program: percore top can ask and end processes alone"


def test_what_is_no_worker_any_more_is_not_ended() -> None:
    (worker,) = Model(os.getpid()).view([page(1.0)]).workers  # the pid is that of this process
    assert top.recycle(worker) == f"worker 0 ({os.getpid()}) has ended already"


def test_the_cpu_of_threads_is_that_of_the_last_second_or_more(monkeypatch: pytest.MonkeyPatch) -> None:
    now, used = 100.0, {1: 5.0, 2: 1.0, 3: 7.0}

    class Process:
        def __init__(self, _: int) -> None: ...

        def threads(self) -> list[Any]:
            return [SimpleNamespace(id=thread, user_time=seconds, system_time=0.0) for thread, seconds in used.items()]

    monkeypatch.setattr(psutil, "Process", Process)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    meter, groups = ThreadsMeter(), [[1, 2], [3], [4]]
    assert meter.measure(7, groups) == [ThreadsUsage(None, 2), ThreadsUsage(None, 1), None]
    now, used = now + 2, {1: 6.0, 2: 1.5, 3: 7.0, 4: 9.0}  # a thread that is new has no figure yet
    assert meter.measure(7, groups) == [ThreadsUsage(75.0, 2), ThreadsUsage(0.0, 1), ThreadsUsage(None, 1)]
    now, used = now + 0.1, {1: 6.1, 3: 9.0}  # too soon: the readings before those count; and no thread uses more than a CPU
    shares = [None if one is None else one.cpu for one in meter.measure(7, groups)]
    assert shares == [pytest.approx(100 * 1.1 / 2.1), pytest.approx(200 / 2.1), None]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_each_program_has_one_line(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    command = f"python crawl.py {' '.join(['http://127.0.0.1/'] * 20)}"
    monkeypatch.setattr(top, "programs", lambda: [Program(7, "crawl.py", command)])
    file = io.StringIO()
    assert top._list(Console(width=60, file=file, force_terminal=is_terminal, color_system=None), as_json=False) == 0
    first, last = file.getvalue().splitlines()
    assert first == (
        "       7  crawl.py  " + command if not is_terminal else ("       7  crawl.py  " + command)[:59] + "\N{HORIZONTAL ELLIPSIS}"
    )
    assert last.startswith("watch one of them")


def test_without_standard_input_it_writes_views(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setattr(top, "read", lambda _: [page(1.0)])
    monkeypatch.setattr(top, "_without_terminal", lambda _model, _show, interval: 3 if interval == 2.0 else 4)
    assert top.top(os.getpid(), interval=2.0, once=False, as_json=False, by_worker=False) == 3


def test_rates() -> None:
    assert (rate(None), rate(1.25), rate(12345.6)) == ("-", "1.2", "12,346")
