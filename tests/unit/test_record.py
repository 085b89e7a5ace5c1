"""What `percore record` makes of stacks."""

import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from percore._record import record as command
from percore._record import recorder
from percore._record.calls import SHORT, Call, Calls, Seen, attributed, begun_by
from percore._record.output import as_html, as_speedscope
from percore._record.recorder import Recording, Unable, record_from_outside
from percore._record.samples import AWAITING, Frame, Stack, from_faulthandler, from_py_spy, from_sampling, of_user, paths_in
from percore._record.tree import by_call, by_function, by_worker, short_names
from tests.unit.test_top import page

HERE = Path(__file__).as_posix()
FETCH = Frame("fetch", "crawl.py")
PARSE = Frame("parse", "crawl.py")


def wait_inside(event: threading.Event, is_inside: threading.Event) -> None:
    is_inside.set()
    event.wait()


def test_a_thread_of_faulthandler_is_the_users_part_of_its_stack() -> None:
    event, is_inside = threading.Event(), threading.Event()
    thread = threading.Thread(target=wait_inside, args=(event, is_inside))
    thread.start()
    is_inside.wait()
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        stacks = from_faulthandler(file.read())
    event.set()
    thread.join()
    ((name, stack),) = [(name, stack) for name, stack in stacks if stack[0].name == "wait_inside"]
    assert name == f"Thread 0x{thread.ident:016x}"
    assert stack[0] == Frame("wait_inside", HERE)
    assert stack[1].name == "wait"


def test_what_is_cut_off_or_no_stack_is_no_frame() -> None:
    text = 'Thread 0x1 (most recent call first):\n  File "crawl.py", line 3 in parse\n  File "cra'
    assert from_faulthandler(text) == [("Thread 0x1", (PARSE,))]
    assert from_faulthandler("") == from_faulthandler("nonsense\n\nmore") == []


def test_py_spys_stacks() -> None:
    main, thread = "thread (7): MainThread;<module> (<string>:1)", "thread (8): percore-0;_bootstrap (threading.py:1032)"
    lines = [
        f"{main};run (percore/_worker/a.py:9);_run_once (asyncio/events.py:80);fetch (crawl.py:3) 7",
        f"{thread};run (percore/_worker/threads.py:5);parse (crawl.py:9);loads (json/__init__.py:346) 2",
        f"{main};main (percore/_worker_process/fork_server.py:9) 40",
        "nonsense",
        "",
    ]
    assert list(from_py_spy("\n".join(lines))) == [
        ("Thread (7)", (FETCH,), 7),
        ("Thread (8)", (PARSE, Frame("loads", "json/__init__.py")), 2),
    ]


def test_the_stacks_of_profiling_sampling() -> None:
    """What CPython 3.15.2 has written, cut."""
    collapsed = [
        "tid:7351;<string>:<module>:6;main.py:_run_loop:125;selectors.py:EpollSelector.select:452 97",
        "tid:7359;threading.py:Thread._bootstrap:1181;threads.py:Threads._guard:277;crawl.py:Site.parse:16;crawl.py:<genexpr>:-1 3",
        "nonsense",
    ]
    where = {
        "Site.parse": "/home/me/crawl.py",
        "Threads._guard": "/x/percore/_worker/threads.py",
        "_run_loop": "/x/percore/_worker_process/main.py",
        "EpollSelector.select": "/usr/lib/python3.15/selectors.py",
        "Thread._bootstrap": "/usr/lib/python3.15/threading.py",
    }
    strings = [*where, *where.values()]
    frames = [{"path_str_id": strings.index(path), "func_str_id": strings.index(name)} for name, path in where.items()]
    records = [
        {"type": "meta", "v": 0},
        {"type": "string_table", "strings": [{"str_id": number, "value": text} for number, text in enumerate(strings)]},
        {"type": "frame_table", "frames": frames},
    ]
    paths = paths_in("\n".join(map(json.dumps, records)))
    stack = (Frame("Site.parse", "/home/me/crawl.py"), Frame("<genexpr>", "crawl.py"))
    assert list(from_sampling("\n".join(collapsed), paths)) == [("Thread 7359", stack, 3)]


def test_the_call_of_a_sample_is_the_only_one_that_ran_on() -> None:
    def calls(*running: tuple[int, str, float]) -> Calls:
        return {("worker 0", 1, number): Call(name, began, number) for number, name, began in running}

    fetch, parse = Seen("worker 0", "Thread 1", (FETCH,)), Seen("worker 0", "Thread 2", (PARSE, FETCH), 3)
    before = calls((1, "m.parse", 7.5), (2, "m.fetch", 11.0), (3, "m.save", 11.0), (4, "m.ended", 9.0))
    after = calls((1, "m.parse", 7.5), (2, "m.fetch", 11.0), (3, "m.save", 11.0), (5, "m.new", 12.0))
    first, second, *awaiting = attributed([fetch, parse], before, after, 10.0)
    assert first == ("worker 0", "call 2, begun after 1.00 s", (FETCH,), 1)
    assert second == ("worker 0", "call 1, begun 2.50 s before", (PARSE, FETCH), 3)
    assert {(call, stack[0].name) for _, call, stack, _ in awaiting if stack[1] == AWAITING} == {
        ("call 3, begun after 1.00 s", "m.save"),
        (SHORT, "m.ended"),
        (SHORT, "m.new"),
    }
    several = [*attributed([parse, parse._replace(thread="Thread 3")], before, after, 10.0)]
    assert [call for _, call, stack, _ in several if stack[0] == PARSE] == [
        "Thread 2: one of several calls",
        "Thread 3: one of several calls",
    ]
    assert {call for _, call, _, _ in attributed([fetch], {}, after, 10.0)} == {SHORT}
    method = Seen("worker 0", "Thread 1", (Frame("Site.parse", "x.py"),))
    assert "call 1, begun 2.50 s before" in [call for _, call, stack, _ in attributed([method], before, after, 10.0)]


def test_of_the_last_page_calls_that_are_not_short_have_run_on() -> None:
    calls: Calls = {
        ("worker 0", 1, 1): Call("m.f", 5.0, 1),
        ("worker 0", 1, 2): Call("m.f", 9.9, 2),
        ("worker 0", 1, 3): Call("m.f", None, 3),
    }
    assert [*begun_by(calls, 9.5)] == [("worker 0", 1, 1)]


def test_frames_of_the_runtime_above_the_users_stay() -> None:
    sleep = Frame("wait", f"{sys.base_prefix}/lib/python3.12/threading.py")
    program = Frame("work", "/home/me/asyncio/work.py")
    assert of_user([Frame("_bootstrap", "/usr/lib/python3.12/threading.py"), program, sleep]) == (program, sleep)


def recording() -> Recording:
    found = Recording(7, "crawl.py", "faulthandler", 0.0, 2.0, 40, names=short_names(["__main__.fetch", "__main__.parse"]))
    found.samples = Counter(
        {
            ("worker 0", (FETCH, PARSE)): 3,
            ("worker 1", (FETCH,)): 2,
            ("worker 1", (Frame("__main__.fetch", ""), AWAITING)): 5,
            ("worker 0", (PARSE,)): 1,
        }
    )
    return found


def test_samples_merge_by_function_and_by_worker() -> None:
    tree = by_function(recording()).plain()
    assert tree["count"] == 11
    assert [(one["name"], one["count"]) for one in tree["above"]] == [("__main__.fetch", 10), ("__main__.parse", 1)]
    assert [(one["name"], one["count"]) for one in tree["above"][0]["above"]] == [("worker 1", 7), ("worker 0", 3)]
    tree = by_worker(recording()).plain()
    assert [(one["name"], one["count"]) for one in tree["above"]] == [("worker 1", 7), ("worker 0", 4)]
    assert [one["name"] for one in tree["above"][0]["above"]] == ["__main__.fetch"]


def test_samples_merge_by_call() -> None:
    found = recording()
    found.add([("worker 0", "call begun after 1.00 s", (FETCH, PARSE), 3), ("worker 0", SHORT, (FETCH,), 1)])
    (fetch,) = by_call(found.calls()).plain()["above"]
    assert (fetch["name"], [one["name"] for one in fetch["above"]]) == ("__main__.fetch", ["worker 0"])
    assert [(one["name"], one["count"]) for one in fetch["above"][0]["above"]] == [("call begun after 1.00 s", 3), (SHORT, 1)]


def test_a_name_that_two_functions_share_means_neither() -> None:
    assert short_names(["a.fetch", "b.fetch", "a.Site.load"]) == {"load": "a.Site.load"}


def test_the_page_holds_the_samples_and_no_name_is_markup() -> None:
    found = recording()
    found.samples["worker 0", (Frame("</script><b>", "x.py"),)] = 1
    page = as_html(found)
    assert page.count("</script>") == 1
    assert "http" not in page
    data = page.partition("const recording = ")[2].partition(";\n")[0]
    trees = json.loads(data)["trees"]
    assert [tree["count"] for tree in trees] == [12, 12, 0]
    assert "</script><b>" in [one["name"] for one in trees[0]["above"]]


def test_what_is_narrower_than_a_pixel_is_left_out() -> None:
    found = recording()
    found.samples["worker 0", (FETCH,)] = 100_000
    assert "__main__.parse" not in as_html(found)


def test_speedscope_gets_a_profile_for_each_worker() -> None:
    data = json.loads(as_speedscope(recording()))
    names = [frame["name"] for frame in data["shared"]["frames"]]
    first, second = data["profiles"]
    assert (first["name"], second["name"]) == ("worker 0", "worker 1")
    assert sum(first["weights"]) == first["endValue"] == 4
    assert [[names[at] for at in sample] for sample in first["samples"]] == [["__main__.fetch", "parse"], ["__main__.parse"]]


# What can go wrong outside


class Sampler:
    """A program that samples workers."""

    name = "sampler"

    def __init__(self, program: str) -> None:
        self._program = program

    def command(self, pid: int, out: Path, seconds: float, rate: float) -> list[str]:
        return [sys.executable, "-I", "-S", "-c", self._program, str(out)]

    def read(self, out: Path) -> Iterator[tuple[str, Stack, int]]:
        if out.read_text() != "whole":
            raise subprocess.CalledProcessError(1, "replay")
        yield "Thread 1", (FETCH,), 3


def test_a_sampler_that_says_much_is_no_reason_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "read", lambda _: [page(1.0)])
    monkeypatch.setattr(recorder, "_PATIENCE", 10.0)
    program = "import sys; sys.stderr.write('x' * 1_000_000); open(sys.argv[1], 'w').write('whole')"
    assert record_from_outside(os.getpid(), 0.1, 10, Sampler(program)).samples["worker 0", (FETCH,)] == 3


def test_what_a_sampler_has_left_of_a_worker_that_has_ended_costs_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    both = page(1.0)
    both["statistics"]["workers"].append(both["statistics"]["workers"][0] | {"index": 1, "pid": os.getppid()})
    monkeypatch.setattr(recorder, "read", lambda _: [both])
    program = f"import sys; open(sys.argv[1], 'w').write('whole' if sys.argv[1].endswith('/{os.getpid()}') else 'who')"
    recording = record_from_outside(os.getpid(), 0.1, 10, Sampler(program))
    assert {worker for worker, stack in recording.samples if stack == (FETCH,)} == {"worker 0"}


def test_where_nothing_can_be_written_another_sampler_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(recorder, "read", lambda _: [page(1.0)])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no"))
    with pytest.raises(Unable, match="No such file"):
        record_from_outside(os.getpid(), 0.1, 10, Sampler(""))


def test_a_full_disk_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = Recording(7, "crawl.py", "sampler", samples=Counter({("worker 0", (FETCH,)): 1}))
    monkeypatch.setattr(command, "_sample", lambda *_: found)
    for name in ("out.json", "out.html"):
        out = tmp_path / name
        out.symlink_to("/dev/full")
        assert command.record(7, str(out), seconds=1, rate=1, sampler="auto") == 1
        assert capsys.readouterr().err == f"percore record: {out} cannot be written: {os.strerror(28)}\n"
