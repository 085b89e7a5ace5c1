"""What `percore record` makes of stacks."""

import faulthandler
import json
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path

from percore._record.output import as_html, as_speedscope
from percore._record.recorder import Recording
from percore._record.samples import AWAITING, Frame, from_faulthandler, from_py_spy, of_user
from percore._record.tree import by_function, by_worker, short_names

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
    (stack,) = [stack for stack in stacks if stack[0].name == "wait_inside"]
    assert stack[0] == Frame("wait_inside", HERE)
    assert stack[1].name == "wait"


def test_what_is_cut_off_or_no_stack_is_no_frame() -> None:
    text = 'Thread 0x1 (most recent call first):\n  File "crawl.py", line 3 in parse\n  File "cra'
    assert from_faulthandler(text) == [(PARSE,)]
    assert from_faulthandler("") == from_faulthandler("nonsense\n\nmore") == []


def test_py_spys_stacks() -> None:
    lines = [
        "<module> (<string>:1);run (percore/_worker/a.py:9);_run_once (asyncio/events.py:80);fetch (crawl.py:3) 7",
        "_bootstrap (threading.py:1032);run (percore/_worker/threads.py:5);parse (crawl.py:9);loads (json/__init__.py:346) 2",
        "<module> (<string>:1);main (percore/_worker_process/fork_server.py:9) 40",
        "nonsense",
        "",
    ]
    assert list(from_py_spy("\n".join(lines))) == [((FETCH,), 7), ((PARSE, Frame("loads", "json/__init__.py")), 2)]


def test_frames_of_the_runtime_above_the_users_stay() -> None:
    sleep = Frame("wait", f"{sys.base_prefix}/lib/python3.12/threading.py")
    program = Frame("work", "/home/me/asyncio/work.py")
    assert of_user([Frame("_bootstrap", "/usr/lib/python3.12/threading.py"), program, sleep]) == (program, sleep)


def recording() -> Recording:
    found = Recording(7, "crawl.py", "faulthandler", 2.0, 40, names=short_names(["__main__.fetch", "__main__.parse"]))
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
    assert [tree["count"] for tree in trees] == [12, 12]
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
