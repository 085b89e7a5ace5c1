"""The judge of the chaos test sees what went wrong, and lets pass what is right; its schedule comes again with the seed."""

import itertools
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import calls
from tests.chaos.history import Entry, Kill, Round, Verdict, judge
from tests.chaos.judge import AT_MOST, PARTS, trials
from tests.chaos.load import MAPS, SINGLE, words_of
from tests.chaos.nemesis import KINDS, schedule
from tests.chaos.order import Attempt, Life, attempts_of, disorders

SECOND = 10**9


def judged(
    folder: Path,
    ledger: list[str],
    outcomes: list[str],
    *,
    kills: list[Kill] | None = None,
    last: int | None = None,
    submitted: dict[int, int] | None = None,
    **told: Any,
) -> Verdict:
    """The verdict on a round of workers 100 (of slot 0, generation 1) and 101 (slot 0, generation 2).

    A call has ended when it has begun, unless its outcome says otherwise or it has an entry about its end.
    """
    (folder / "ledger").write_text("".join(f"{line}\n" for line in [*ledger, *ends(ledger, outcomes)]))
    numbers = [int(line.split()[0]) for line in (*ledger, *outcomes)]
    times = dict.fromkeys(numbers, 1) if submitted is None else submitted
    (folder / "submitted").write_text("".join(f"{uuid} {ns}\n" for uuid, ns in times.items()))
    (folder / "outcomes").write_text("".join(f"{line}\n" for line in outcomes))
    one = Round(folder, kills=kills or [], born={100: (0, 1), 101: (0, 2)})
    told_of = {line.split()[0] for line in outcomes}
    one.told = {"round": 1, "last": len(told_of) if last is None else last, "hung": 0, "closing": "in order", "settings": {}}
    one.told |= {"left": [], "wrong": [], **told}
    return judge(one)


def ends(ledger: list[str], outcomes: list[str]) -> list[str]:
    """The entries about the ends of calls that have a value and no such entry."""
    if any(line.endswith(calls.ENDED) for line in ledger):
        return []
    died = {line.split()[0] for line in outcomes if " died " in line}
    return [f"{line} {calls.ENDED}" for line in ledger if line.split()[0] not in died]


def value(uuid: int) -> str:
    return f"{uuid} task 1 5 - value {calls.answer(uuid)}"


KILLED = [Kill(2 * SECOND, "kill", 100, 0, 1)]


def test_what_is_right_passes(tmp_path: Path) -> None:
    pattern = calls.pattern(2)
    outcomes = [
        value(1),
        f"2 echo 1 5 - bytes {len(pattern)} {zlib.crc32(pattern)}",
        f"3 failing 1 5 - error {calls.answer(3)}",
        "4 task 1 5 c cancelled",
        f"5 task 1 {2 * SECOND + 1_000_000} - died 1 100 1",
        "6 slow 1 5 - timeout",
        "7 task 1 5 z closed",
        "8 tiny 1 5 - dropped",
        "9 tiny 1 5 - unpulled",
        f"10 flaky 4 {3 * SECOND} - value {calls.answer(10)}",
        "11 task 1 5 z died 0 100 0",
        f"12 everywhere 2 5 - all {calls.answer(12)} {calls.answer(12)}",
    ]
    ran = [1, 2, 3, 5, 6, 8, 10, 10, 12, 12]
    ledger = [f"{uuid} 100 1 5" for uuid in ran] + [f"10 101 2 {2 * SECOND + 40_000_000}"]
    verdict = judged(tmp_path, ledger, outcomes, kills=KILLED)
    assert verdict.sentences == []
    assert verdict.is_clean
    assert (verdict.calls, verdict.unrun) == (11, 0)
    assert (verdict.detection, verdict.recovery) == ([0.001], [0.04])


@pytest.mark.parametrize(
    ("breach", "ledger", "outcomes"),
    [
        ("lost", ["1 100 1 5"], []),
        ("twice", ["1 100 1 5", "1 101 2 9"], [value(1)]),
        ("twice", ["1 100 1 5"], [value(1), value(1)]),
        ("twice", ["1 100 1 9"], [value(1)]),
        ("twice", ["1 100 1 5"], ["1 tiny 1 5 - unpulled"]),
        ("twice", ["1 100 1 5"], ["1 task 1 5 - full"]),
        ("twice", ["1 100 1 5"] * 5, [f"1 flaky 4 5 - value {calls.answer(1)}"]),
        ("wrong value", ["1 100 1 5"], [f"1 task 1 5 - value {calls.answer(2)}"]),
        ("wrong value", ["1 100 1 5"], [f"1 task 1 5 - error {calls.answer(1)}"]),
        ("wrong value", ["13 100 1 5"], [f"13 tiny_failing 1 5 - value {calls.answer(13)}"]),
        ("wrong value", ["1 100 1 5"], ["1 echo 1 5 - bytes 300000 7"]),
        ("wrong value", [], [value(1)]),
        ("wrong value", ["2 100 1 5"], []),
        ("wrong value", [], ["1 task 1 5 - cancelled"]),
        ("wrong value", [], ["1 task 1 5 - closed"]),
        ("wrong value", ["1 100 1 5"], ["1 task 1 5 - timeout"]),
        ("wrong value", ["1 100 1 5"], ["1 task 1 5 - OSError OSError(5)"]),
        ("wrong value", [], ["1 task 1 5 - died 0 100 0"]),
        ("wrong value", ["1 100 1 5"], ["1 task 1 5 z died 0 100 0"]),
        ("wrong value", ["1 101 2 5"], ["1 task 1 5 - died 1 101 1"]),
        ("wrong value", ["1 101 2 5"], ["1 task 1 5 - died 1 100 1"]),
        ("wrong value", ["1 100 1 5"], ["1 retried 4 5 - died 1 100 1"]),
    ],
)
def test_what_is_wrong_is_seen(breach: str, ledger: list[str], outcomes: list[str], tmp_path: Path) -> None:
    last = max(int(line.split()[0]) for line in outcomes) if outcomes else 1
    verdict = judged(tmp_path, ledger, outcomes, kills=KILLED, last=last)
    assert verdict.breaches[breach]
    assert not verdict.is_clean
    assert any(sentence.startswith(breach) for sentence in verdict.sentences)


@pytest.mark.parametrize(
    ("breach", "told"),
    [("hung", {"hung": 1, "last": 2}), ("left behind", {"left": ["a thread"]}), ("wrong value", {"wrong": ["it serves nobody"]})],
)
def test_what_the_program_says_of_itself_counts(breach: str, told: dict[str, Any], tmp_path: Path) -> None:
    verdict = judged(tmp_path, ["1 100 1 5"], [value(1)], **told)
    assert [kind for kind, count in verdict.breaches.items() if count] == [breach]


@pytest.mark.parametrize(("distance", "is_clean"), [(0.04, True), (0.0399, False)])
def test_too_many_starts_are_seen(distance: float, is_clean: bool, tmp_path: Path) -> None:
    rate = calls.RATES["even"]
    starts = [f"even {int(number * distance * 1e9)}" for number in range(3 * rate.n)] + ["burst 5"]
    (tmp_path / "rates").write_text("\n".join(starts))
    verdict = judged(tmp_path, ["1 100 1 5"], [value(1)])
    assert verdict.is_clean is is_clean
    assert verdict.fullest == {"even": rate.n + (not is_clean), "burst": 1}


def test_a_death_before_the_first_statement_is_counted(tmp_path: Path) -> None:
    verdict = judged(tmp_path, [], ["1 task 1 5 - died 1 100 1"], kills=KILLED)
    assert (verdict.is_clean, verdict.unrun) == (True, 1)


@pytest.mark.parametrize(("milliseconds", "is_clean"), [(1900, True), (100, False)])
def test_a_call_beside_a_stuck_one_has_time_to_end(milliseconds: int, is_clean: bool, tmp_path: Path) -> None:
    ledger = ["1 101 2 5", f"2 101 2 {2 * SECOND}"]
    died = f"2 task 1 {2 * SECOND + milliseconds * 1_000_000} - died 1 101 1"
    verdict = judged(tmp_path, ledger, [f"1 stuck 1 {3 * SECOND} - timeout", died], last=2)
    assert verdict.is_clean is is_clean


def test_figures_add_up(tmp_path: Path) -> None:
    total = Verdict()
    for ledger in (["1 100 1 5"], ["1 100 1 4", "1 100 1 5"]):
        total.add(judged(tmp_path, ledger, [value(1)], kills=KILLED))
    assert (total.rounds, total.calls, total.kills, total.outcomes) == (2, 2, {"kill": 2}, {"value": 2})
    assert (total.breaches["twice"], len(total.sentences)) == (1, 1)


def test_decisions_come_again_with_the_seed() -> None:
    first, again, other = (list(itertools.islice(schedule(seed, 0.1), 1000)) for seed in ("7", "7", "8"))
    assert first == again != other
    assert {fault.kind for fault in first} == set(KINDS)
    assert 0.08 < sum(fault.after for fault in first) / 1000 < 0.12


def test_the_kills_are_shared_out() -> None:
    for kills in (1, 50, 1000, 10_000):
        planned = list(trials(kills, "7"))
        assert kills <= sum(count for *_, count in planned) <= kills + len(PARTS)
        assert {part for part, *_ in planned} == set(PARTS)
        assert len({seed for _, seed, _ in planned}) == len(planned)
        assert max(count for *_, count in planned) <= AT_MOST


def test_every_kind_of_call_is_one_the_judge_knows(tmp_path: Path) -> None:
    """What a call of this kind gives, when it is called here, is what the judge wants of it."""
    for kind in ("tiny", "tiny_pair", "tiny_failing"):
        assert kind in MAPS
    words = {
        "failing": words_of(LookupError(calls.answer(1))),
        "large_result": words_of(calls.pattern(1)),
        "echo": words_of(bytearray(calls.pattern(1))),
        "tiny_pair": words_of((calls.answer(1), 1)),
        "exiting": "remote SystemExit",
        "unpicklable": "remote TypeError",
        "large_item": words_of(calls.pattern(1)),
    }
    for kind in [*SINGLE, *MAPS]:
        said = words.get(kind, words_of(calls.answer(1)))
        verdict = judged(tmp_path, ["1 100 1 5"], [f"1 {kind} 1 5 - {said}"])
        assert verdict.sentences == [], kind


# The order of events


def told_of(history: str) -> list[str]:
    """What is wrong with a call's life, written as its events in order: `submit`, `begin 100`, `end 100`, `value`, `sign 100`, ...

    `sign` is an entry of the worker about another call.
    """
    begins, ends_, latest = [], [], {100: 0, 101: 0}
    submitted, told, words = None, 99, "dropped"
    for ns, (event, *rest) in enumerate((event.split() for event in history.split(", ")), 1):
        pid = int(rest[0]) if event in ("begin", "end", "sign") else 0
        if pid:
            latest[pid] = ns
        if event == "begin":
            begins.append(Entry(1, pid, 1, ns))
        elif event == "end":
            ends_.append(Entry(1, pid, 1, ns))
        elif event == "submit":
            submitted = ns
        elif event != "sign":
            told, words = ns, " ".join([event, *rest])
    life = Life(submitted, attempts_of(begins, ends_), told, "task", words.split(), is_cut=False)
    return list(disorders(life, lambda attempt: latest[attempt.pid]))


def test_lives_in_order_pass(subtests: pytest.Subtests) -> None:
    for history in (
        "submit, begin 100, end 100, value 1",
        "submit, cancelled",
        "submit, begin 100, cancelled, end 100",
        "submit, begin 100, died 1 100 1, sign 101",
        "submit, begin 100, end 100, died 1 100 1",
        "submit, begin 100, sign 100, begin 101, end 101, value 1",
        "submit, begin 100, end 100, begin 100, end 100, error 1",
        "submit, died 0 100 0, sign 100",
        "submit, begin 100, timeout, end 100",
        "full",
    ):
        with subtests.test(history=history):
            assert told_of(history) == []


def test_lives_out_of_order_are_seen(subtests: pytest.Subtests) -> None:
    for history, wrong in {
        "begin 100, end 100, value 1": "never submitted",
        "value 1, submit": "told before it was submitted",
        "begin 100, submit, end 100, value 1": "began before it was submitted",
        "submit, begin 100, value 1": "never ended",
        "submit, begin 100, value 1, end 100": "told before it had ended",
        "submit, begin 100, begin 101, end 101, sign 100, value 1": "still lived",
        "submit, begin 100, begin 101, end 100, end 101, value 1": "before its last attempt had ended",
        "submit, begin 100, died 1 100 1, sign 100": "which lived on",
        "submit, begin 100, end 100, begin 100, value 1": "never ended",
    }.items():
        with subtests.test(history=history):
            (found,) = told_of(history)
            assert wrong in found


def test_an_end_belongs_to_the_attempt_before_it() -> None:
    begins = [Entry(1, pid, 1, ns) for pid, ns in ((100, 1), (101, 5), (100, 7))]
    ended = [Entry(1, 100, 1, ns) for ns in (3, 9, 8)]
    assert attempts_of(begins, ended) == [Attempt(100, 1, 3), Attempt(101, 5, None), Attempt(100, 7, 9)]


def test_the_order_of_a_round_is_judged(tmp_path: Path) -> None:
    for ledger, submitted in ((["1 100 1 5"], {}), (["1 100 1 5", f"1 100 1 9 {calls.ENDED}"], {1: 1}), (["1 100 1 5"], {1: 6})):
        verdict = judged(tmp_path, ledger, [value(1)], submitted=submitted)
        assert verdict.breaches["out of order"], ledger
    assert judged(tmp_path, ["1 100 1 4", f"1 100 1 5 {calls.ENDED}"], [value(1)], submitted={1: 4}).is_clean
