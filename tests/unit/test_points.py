"""The places where tests strike: what PERCORE_POINTS means. Nothing here ends the process that runs it."""

import os
import signal

import pytest

from percore import _points
from percore._points import Plan, _parse, point, this_is_worker


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No plans, no passings, actions that only note themselves; what was done."""
    done: list[str] = []

    def note(name: str) -> None:
        done.append(name)

    monkeypatch.setattr(_points, "_ACTIONS", {name: (lambda name=name: note(name)) for name in _points._ACTIONS})
    monkeypatch.setattr(_points, "_plans", {})
    monkeypatch.setattr(_points, "_passed", {})
    monkeypatch.setattr(_points, "_here", "")
    return done


def plan(text: str) -> None:
    _points._plans.update(_parse(text))


def test_off_unless_asked_for() -> None:
    assert _parse("") == {}
    assert not _points.POINTS


@pytest.mark.parametrize(
    ("text", "planned"),
    [
        ("worker.ready=kill", {"worker.ready": Plan("kill", 1, "")}),
        ("worker.ready=kill@3", {"worker.ready": Plan("kill", 3, "")}),
        ("worker.ready=stop#0.1", {"worker.ready": Plan("stop", 1, "0.1")}),
        ("worker.ready=exit@2#10.12", {"worker.ready": Plan("exit", 2, "10.12")}),
        ("a=fail,b=interrupt@5,", {"a": Plan("fail", 1, ""), "b": Plan("interrupt", 5, "")}),
    ],
)
def test_the_language(text: str, planned: dict[str, Plan]) -> None:
    assert _parse(text) == planned


@pytest.mark.parametrize("text", ["worker.ready", "worker.ready=", "worker.ready=explode", "a=kill,b=@2"])
def test_an_unknown_action_is_told(text: str) -> None:
    with pytest.raises(ValueError, match=r"PERCORE_POINTS: .* known are: kill, segv, abrt, bus, stop, exit, interrupt, fail"):
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
        _points._ACTIONS["interrupt"]()
    with pytest.raises(OSError, match="PERCORE_POINTS"):
        _points._ACTIONS["fail"]()


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("kill", signal.SIGKILL),
        ("segv", signal.SIGSEGV),
        ("abrt", signal.SIGABRT),
        ("bus", signal.SIGBUS),
        ("stop", signal.SIGSTOP),
    ],
)
def test_the_actions_that_signal(monkeypatch: pytest.MonkeyPatch, name: str, number: signal.Signals) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, signum: sent.append((pid, signum)))
    _points._ACTIONS[name]()
    assert sent == [(os.getpid(), number)]


def test_exit_is_at_once_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    _points._ACTIONS["exit"]()
    assert codes == [0]
