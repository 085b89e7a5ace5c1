"""The places where tests strike: what PERCORE_POINTS means. Nothing here ends the process that runs it."""

import faulthandler
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from percore._common import fault_points
from percore._common.fault_points import Strike, _parse, point, this_is_worker
from tests.sweep import places


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No plans, no passings, actions that only note themselves; what was done."""
    done: list[str] = []

    def note(name: str) -> None:
        done.append(name)

    monkeypatch.setattr(fault_points, "_ACTIONS", {name: (lambda name=name: note(name)) for name in fault_points._ACTIONS})
    monkeypatch.setattr(fault_points, "_plans", {})
    monkeypatch.setattr(fault_points, "_passed", {})
    monkeypatch.setattr(fault_points, "_here", "")
    return done


def plan(text: str) -> None:
    fault_points._plans.update(_parse(text))


def test_off_unless_asked_for() -> None:
    assert _parse("") == {}
    assert not fault_points.POINTS


@pytest.mark.parametrize(
    ("text", "planned"),
    [
        ("worker.ready=kill", {"worker.ready": Strike("kill", 1, "")}),
        ("worker.ready=kill@3", {"worker.ready": Strike("kill", 3, "")}),
        ("worker.ready=stop#0.1", {"worker.ready": Strike("stop", 1, "0.1")}),
        ("worker.ready=exit@2#10.12", {"worker.ready": Strike("exit", 2, "10.12")}),
        ("a=fail,b=interrupt@5,", {"a": Strike("fail", 1, ""), "b": Strike("interrupt", 5, "")}),
        ("a=kill@2~full,b=kill!", {"a": Strike("kill", 2, "", "full"), "b": Strike("kill", 1, "", "", has_gate=True)}),
        ("a=libcexit@2#0.1~busy!", {"a": Strike("libcexit", 2, "0.1", "busy", has_gate=True)}),
    ],
)
def test_the_language(text: str, planned: dict[str, Strike]) -> None:
    assert _parse(text) == planned


@pytest.mark.parametrize("text", ["worker.ready", "worker.ready=", "worker.ready=explode", "a=kill,b=@2"])
def test_an_unknown_action_is_told(text: str) -> None:
    with pytest.raises(ValueError, match=r"PERCORE_POINTS: .* known are: kill, segv, abrt, bus, stop, term, exit, .*"):
        _parse(text)


def test_an_unplanned_place_does_nothing(done: list[str]) -> None:
    plan("worker.ready=kill")
    point("worker.other")
    assert done == []


def test_the_first_passing_alone_by_default(done: list[str]) -> None:
    plan("worker.ready=kill")
    point("worker.ready")
    point("worker.ready")
    assert done == ["kill"]


def test_the_nth_passing_alone(done: list[str]) -> None:
    plan("worker.ready=stop@3")
    for expected in ([], [], ["stop"], ["stop"]):
        point("worker.ready")
        assert done == expected


def test_places_are_counted_apart(done: list[str]) -> None:
    plan("a=stop@2,b=exit@2")
    for name in "abab":
        point(name)
    assert done == ["stop", "exit"]


def test_in_that_worker_alone(done: list[str]) -> None:
    plan("worker.ready=segv@2#1.2")
    for index, generation in ((1, 1), (0, 2), (1, 2), (1, 2)):
        this_is_worker(index, generation)
        assert done == []
        point("worker.ready")
    assert done == ["segv"]


def test_the_supervisor_is_no_worker(done: list[str]) -> None:
    plan("supervisor.outcome.delivered=kill#0.1")
    point("supervisor.outcome.delivered")
    assert done == []


def test_the_actions_that_raise() -> None:
    with pytest.raises(KeyboardInterrupt):
        fault_points._ACTIONS["interrupt"]()
    with pytest.raises(OSError, match="PERCORE_POINTS"):
        fault_points._ACTIONS["fail"]()


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("kill", signal.SIGKILL),
        ("stop", signal.SIGSTOP),
        ("term", signal.SIGTERM),
    ],
)
def test_the_actions_that_signal(monkeypatch: pytest.MonkeyPatch, name: str, number: signal.Signals) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, signum: sent.append((pid, signum)))
    fault_points._ACTIONS[name]()
    assert sent == [(os.getpid(), number)]


@pytest.mark.parametrize(("name", "number"), [("segv", signal.SIGSEGV), ("abrt", signal.SIGABRT), ("bus", signal.SIGBUS)])
def test_the_actions_that_crash_do_so_in_their_thread(monkeypatch: pytest.MonkeyPatch, name: str, number: signal.Signals) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(signal, "pthread_kill", lambda thread, signum: sent.append((thread, signum)))
    monkeypatch.setattr(faulthandler, "disable", lambda: sent.append((0, 0)))
    fault_points._ACTIONS[name]()
    assert sent == [(0, 0), (threading.get_ident(), number)]


def test_exit_is_at_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    fault_points._ACTIONS["exit"]()
    assert codes == [0]


# Plans in a folder


@pytest.fixture
def folder(done: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(fault_points, "_FOLDER", str(tmp_path))
    monkeypatch.setattr(fault_points, "_known", {})
    monkeypatch.setattr(fault_points, "observe", str)
    os.mkfifo(tmp_path / "hits")
    os.mkfifo(tmp_path / "gate")
    yield tmp_path
    fault_points.observe = str


@pytest.fixture
def hits(folder: Path) -> Iterator[Callable[[], list[str]]]:
    fd = os.open(folder / "hits", os.O_RDWR | os.O_NONBLOCK)

    def lines() -> list[str]:
        try:
            return os.read(fd, 65536).decode().splitlines()
        except BlockingIOError:
            return []

    yield lines
    os.close(fd)


def test_a_plan_in_the_folder_is_carried_out_once_and_told(done: list[str], folder: Path, hits: Callable[[], list[str]]) -> None:
    point("worker.ready")
    (folder / "worker.ready").write_text("kill@2")
    this_is_worker(1, 3)
    for _ in range(4):
        point("worker.ready")
    assert done == ["kill"]
    assert hits() == [f"worker.ready kill 2 1.3 {os.getpid()}"]
    assert not (folder / "worker.ready").exists()


def test_a_new_plan_counts_anew(done: list[str], folder: Path, hits: Callable[[], list[str]]) -> None:
    (folder / "a").write_text("kill@3")
    point("a")
    point("a")
    (folder / "a").write_text("exit@2")
    point("a")
    assert done == []
    point("a")
    assert done == ["exit"]
    assert hits() == [f"a exit 2 - {os.getpid()}"]


def test_the_same_plan_written_again_is_a_new_one(done: list[str], folder: Path, hits: Callable[[], list[str]]) -> None:
    for turn in (1, 2):
        (folder / "a").write_text("kill@2")
        os.utime(folder / "a", ns=(turn, turn))
        point("a")
        assert len(done) == turn - 1
        point("a")
    assert done == ["kill", "kill"]
    assert len(hits()) == 2


def test_what_another_process_has_done_is_done(
    done: list[str], folder: Path, hits: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a").write_text("kill")

    def taken_meanwhile() -> str:
        (folder / "a").unlink()
        return ""

    monkeypatch.setattr(fault_points, "observe", taken_meanwhile)
    point("a")
    assert (done, hits()) == ([], [])


def test_only_passings_in_that_state_count(
    done: list[str], folder: Path, hits: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = iter(["", "busy", "full busy", "busy", "fullest", "full"])
    monkeypatch.setattr(fault_points, "observe", lambda: next(states))
    (folder / "a").write_text("kill@2~full")
    for _ in range(5):
        point("a")
    assert done == []
    point("a")
    assert done == ["kill"]
    assert hits() == [f"a kill 2 - {os.getpid()} full"]


def test_nothing_happens_before_the_gate_opens(done: list[str], folder: Path, hits: Callable[[], list[str]]) -> None:
    (folder / "a").write_text("kill!")
    thread = threading.Thread(target=point, args=("a",))
    thread.start()
    with open(folder / "gate", "wb", buffering=0) as gate:  # opens when the other side waits there
        assert done == []
        assert hits() == [f"a kill 1 - {os.getpid()}"]
        gate.write(b".")
        thread.join()
    assert done == ["kill"]


# The places in the source


def places_in_source() -> set[str]:
    """Each name that is given to `point`; one side's and the other's where both pass the same line."""
    found = set()
    for path in Path(fault_points.__file__).parents[1].rglob("*.py"):
        for arguments in re.findall(r"^ *point\((.*)\)$", path.read_text().partition('"""\n\n')[2], re.MULTILINE):
            for name in re.findall(r'"([^"]+)"', arguments):
                found |= {name.replace("{self._side}", side) for side in ("supervisor", "worker")}
    return found


def test_the_sweep_knows_every_place() -> None:
    assert len(places.ALL) == len(set(places.ALL))
    assert places_in_source() == set(places.ALL)


def test_no_place_costs_anything_while_there_are_no_plans() -> None:
    for path in Path(fault_points.__file__).parents[1].rglob("*.py"):
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            if re.match(r" +point\(", line):
                assert lines[number - 1].strip() == "if POINTS:", f"{path.name}:{number + 1}"
