"""Meters: which waits are measured, and when pickling is worth advice."""

from percore._calls.meters import OTHERS, UNMETERED, Meter, Meters

MS = 1_000_000


def test_waits_of_calls_in_a_hurry_are_measured_ever_less_often_and_stand_for_more() -> None:
    meter = Meter("f")
    gaps = []
    for now in range(1, 13):
        mark = meter.mark(now * 1000)
        assert mark
        meter.waited(mark, now * 1000 + 7)
        gaps.append(meter.left)
    assert gaps == [2, 4, 8, 16, 32, 64, 128, 256, 256, 256, 256, 256]
    assert meter.wait.counts == {7: sum((1, *gaps[:-1]))}
    for place in range(9):
        meter.mark((place + 1) * 10 * MS)
    assert meter.left == 1
    meter.waited(meter.mark(200 * MS), 100 * MS)  # the clock of the mark cannot be after that of the begin
    assert meter.wait.counts[0] == 1


def test_the_items_of_a_batch_wait_alike() -> None:
    meter = Meter("f")
    meter.waited(meter.mark_run(), 0, 2000)
    assert meter.wait.counts == {0: 2000}


def test_pickling_that_takes_longer_than_the_work_gets_advice() -> None:
    meter = Meter("f")
    meter.run.add(100 * MS)
    meter.loaded_all(1, 90 * MS, 1000)
    assert meter.advice() is None
    meter.measured(0, 0, 1, 60 * MS)
    assert "1.5 times as long as the work, most of it for results: return less" in str(meter.advice())
    meter.dumped(500 * MS, 1000)
    assert "6.5 times as long as the work, most of it for arguments: share" in str(meter.advice())


def test_unpickling_arguments_is_no_work_although_it_belongs_to_the_run() -> None:
    meter = Meter("f")
    meter.run.add(100 * MS)
    meter.measured(1, 100 * MS, 0, 0)
    assert "pickling takes all of the time" in str(meter.advice())


def test_little_pickling_is_worth_no_advice() -> None:
    meter = Meter("f")
    meter.run.add(1000)
    meter.dumped(49 * MS, 10)
    assert meter.advice() is None


def test_functions_beyond_the_limit_share_a_meter() -> None:
    meters = Meters()
    for number in range(1024):
        assert meters.named(str(number)).name == str(number)
    assert meters.named("more").name == OTHERS
    assert meters.named("more") is meters.named("still more")
    assert len(meters.all()) == 1025


def test_meters_that_are_off_measure_nothing() -> None:
    meters = Meters(is_on=False)
    assert meters.of(print) is meters.named("print") is UNMETERED
    UNMETERED.sized(5)
    assert (UNMETERED.payload.count, UNMETERED.mark_run(), meters.all()) == (0, 0, [])
    assert UNMETERED.left > 1 << 50
