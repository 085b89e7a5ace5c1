"""What follows a call that exceeds its hard timeout."""

from percore._scheduler.overruns import OBEYS, Overruns, Step, steps, waits


def test_its_worker_is_replaced_ahead_of_the_kill() -> None:
    assert steps(5.0) == ((Step.REPLACE, OBEYS), (Step.KILL, 5.0))
    assert steps(0.4) == ((Step.REPLACE, 0.2), (Step.KILL, 0.4))


def test_only_what_has_begun_uses_up_its_time() -> None:
    assert waits(2.0, begun=False, age=None) == 2.0
    assert waits(2.0, begun=True, age=None) == 2.0
    assert waits(2.0, begun=True, age=0.5) == 1.5
    assert waits(2.0, begun=True, age=2.5) == 0.0


def test_a_worker_pauses_from_its_first_overrun_to_its_last() -> None:
    overruns: Overruns[str] = Overruns()
    assert not overruns.calls
    assert overruns.began("worker", 1)
    assert not overruns.began("worker", 2)
    assert overruns.began("other", 1)
    assert overruns.has("worker", 2)
    assert not overruns.has("other", 2)
    assert overruns.workers() == [("worker", {1, 2}), ("other", {1})]
    assert not overruns.ended("worker", {1})
    assert overruns.ended("worker", {2})
    assert overruns.ended("other", {1})
    assert not overruns.calls
