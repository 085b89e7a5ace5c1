"""What waits of a map: runs cut, put back, merged and dropped; no item lost, none twice, each in its place."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from percore._scheduler.batching import Batches, Run
from percore._scheduler.windows import Cost
from tests.counts import times

FRAME = 65_536


def pop(batches: Batches[Run], workers: int = 1) -> Run:
    """Cut a batch of items, some of which wait."""
    run = batches.pop(workers)
    assert run is not None
    return run


def body(number: int) -> str:
    return f"item {number}"


def run_of(start: int, count: int, *, is_bare: bool = True, weight: int = 16, is_encoded: bool = False) -> Run:
    found = range(start, start + count)
    data = b"".join(number.to_bytes(weight, "little") for number in found) if is_encoded else b""
    return Run(start, [body(number) for number in found], is_bare, weight, data)


def numbers(run: Run) -> list[int]:
    """The numbers of a run's items, each of which has its own body."""
    found = list(range(run.start, run.start + len(run.bodies)))
    assert run.bodies == [body(number) for number in found]
    if run.data:
        width = run.weight
        assert [int.from_bytes(run.data[at : at + width], "little") for at in range(0, len(run.data), width)] == found
    return found


class BatchesMachine(RuleBasedStateMachine):
    """Compares with sorted numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: Batches[Run] = Batches(lambda run: run, FRAME)
        self.waiting: list[int] = []
        self.sort: dict[int, tuple[bool, int]] = {}
        """Of every item: whether it is bare, and its weight at least."""
        self.taken: list[Run] = []
        self.end = 0

    @rule(count=st.integers(1, 300))
    def append_encoded(self, count: int) -> None:
        self.append(count, True, 16, is_encoded=True)

    @rule(count=st.integers(1, 300), is_bare=st.booleans(), weight=st.sampled_from([0, 16, 1000, 20_000, 10**6]))
    def append(self, count: int, is_bare: bool, weight: int, is_encoded: bool = False) -> None:
        self.batches.append(run_of(self.end, count, is_bare=is_bare, weight=weight, is_encoded=is_encoded))
        added = range(self.end, self.end + count)
        self.sort.update(dict.fromkeys(added, (is_bare, weight)))
        self.waiting += added
        self.end += count

    @rule(count=st.integers(1, 10), seconds=st.sampled_from([1e-7, 1e-5, 1e-4, 1.0]))
    def measure(self, count: int, seconds: float) -> None:
        self.batches.cost.measured(count, count * seconds)

    @precondition(lambda self: self.waiting)
    @rule(workers=st.integers(1, 8))
    def pop(self, workers: int) -> None:
        most = self.batches.cost.batch(len(self.waiting), workers)
        run = pop(self.batches, workers)
        count = len(run.bodies)
        assert 1 <= count <= most
        assert numbers(run) == self.waiting[:count]  # the first ones, in order
        for number in numbers(run):
            is_bare, weight = self.sort[number]
            assert run.is_bare is is_bare
            assert run.weight >= weight
        assert count == 1 or count * run.weight <= FRAME
        del self.waiting[:count]
        self.taken.append(run)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        """The last items of a batch come back, as when it was recalled or its worker has died."""
        run = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        begun = data.draw(st.integers(0, len(run.bodies) - 1))
        back = run.part(begun, len(run.bodies))
        self.batches.put_back(back)
        self.waiting = sorted([*self.waiting, *numbers(back)])

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """A map has failed at some item: what comes behind that is wanted no more, wherever it is."""
        number = data.draw(st.integers(0, self.end))
        self.batches.drop_from(number)
        self.waiting = [waiting for waiting in self.waiting if waiting < number]
        self.taken = [run for run in self.taken if run.start < number]

    @invariant()
    def it_knows_how_many(self) -> None:
        assert len(self.batches) == len(self.waiting)
        assert bool(self.batches) is bool(self.waiting)

    @rule()
    def pop_all(self) -> None:
        left: list[int] = []
        while self.batches:
            left += numbers(pop(self.batches))
        assert left == self.waiting
        self.waiting = []


TestBatches = BatchesMachine.TestCase
TestBatches.settings = settings(max_examples=times(30, 3000), stateful_step_count=30, deadline=None)
TestBatches.pytestmark = [pytest.mark.long]  # type: ignore[attr-defined]


def batches_of(*runs: Run, seconds: float = 1e-6, cost: Cost | None = None) -> Batches[Run]:
    batches: Batches[Run] = Batches(lambda run: run, FRAME, cost)
    batches.cost.measured(1, seconds)
    for run in runs:
        batches.append(run)
    return batches


def popped(batches: Batches[Run], workers: int = 1) -> list[list[int]]:
    found = []
    while batches:
        found.append(numbers(pop(batches, workers)))
    return found


def test_what_was_encoded_is_cut_and_joined_with_its_items() -> None:
    """Never encoded again: of a batch, of one over two runs, of what was put back, of what is left when others are dropped."""
    batches = batches_of(*(run_of(start, 1000, is_encoded=True) for start in (0, 1000, 2000)), seconds=1.25e-6)
    first, second = pop(batches, 2), pop(batches, 2)
    assert [len(run.data) for run in (first, second)] == [800 * 16] * 2
    assert numbers(second) == list(range(800, 1600))  # of two runs
    batches.put_back(first.part(300, 800))
    batches.drop_from(2500)
    rest = []
    while batches:
        run = pop(batches, 2)
        assert run.data
        rest += numbers(run)
    assert rest == [*range(300, 800), *range(1600, 2500)]


def test_what_is_appended_piece_by_piece_is_one_batch() -> None:
    assert popped(batches_of(*(run_of(number, 1) for number in range(100)))) == [list(range(100))]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (run_of(0, 5), run_of(5, 5, is_bare=False)),
        (run_of(0, 5, is_bare=False), run_of(5, 5)),
        (run_of(0, 5), run_of(6, 5)),
    ],
    ids=["bodies", "bare", "gap"],
)
def test_what_does_not_belong_together_is_never_one_batch(one: Run, other: Run) -> None:
    batches = batches_of(one, other)
    assert len(batches) == 10
    assert popped(batches) == [numbers(one), numbers(other)]


def test_a_batch_is_made_of_its_run() -> None:
    batches: Batches[tuple[str, Run]] = Batches(lambda run: ("made", run), FRAME)
    batches.append(run_of(3, 1))
    assert batches.pop(1) == ("made", run_of(3, 1))


def test_without_a_measurement_items_go_one_by_one() -> None:
    batches: Batches[Run] = Batches(lambda run: run, FRAME)
    batches.append(run_of(0, 3))
    assert popped(batches) == [[0], [1], [2]]


def test_what_is_known_of_a_function_is_used_and_kept() -> None:
    cost = Cost()
    cost.measured(1, 1e-4)
    batches: Batches[Run] = Batches(lambda run: run, FRAME, cost)
    assert batches.cost is cost
    batches.append(run_of(0, 100))
    assert len(pop(batches).bodies) == 10


@pytest.mark.parametrize(
    ("weight", "count"), [(0, 100), (16, 100), (655, 100), (656, 99), (FRAME // 2, 2), (FRAME, 1), (1 << 30, 1)]
)
def test_a_batch_fits_a_frame(weight: int, count: int) -> None:
    assert len(pop(batches_of(run_of(0, 100, weight=weight))).bodies) == count


def test_the_heaviest_item_of_a_run_counts() -> None:
    batches = batches_of(run_of(0, 50, weight=16), run_of(50, 1, weight=FRAME // 4), run_of(51, 50, weight=16))
    assert popped(batches)[0] == [0, 1, 2, 3]


def test_what_comes_back_goes_before_all_later_ones() -> None:
    batches = batches_of(run_of(0, 60), seconds=1e-4)
    first, second, third = (pop(batches) for _ in range(3))
    assert [numbers(run)[0] for run in (first, second, third)] == [0, 10, 20]
    for run in (third, first, second):  # in whatever order their workers tell
        batches.put_back(run)
    assert [item for run in popped(batches) for item in run] == list(range(60))


def test_a_batch_that_was_cut_does_not_change_with_what_is_appended() -> None:
    batches = batches_of(run_of(0, 5))
    run = pop(batches)
    batches.put_back(run)
    kept = pop(batches)
    batches.append(run_of(5, 5))
    batches.append(run_of(10, 5))
    assert numbers(kept) == list(range(5))


@pytest.mark.parametrize("failing", ["make", "copy"])
def test_after_an_error_all_items_wait_again_in_their_order(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(run: Run) -> Run:
        if errors:
            raise errors.pop()
        return run

    errors: list[BaseException] = [MemoryError()]
    cost = Cost()
    cost.measured(1, 1e-6)
    batches: Batches[Run] = Batches(fails if failing == "make" else lambda run: run, FRAME, cost)
    for start, count in ((0, 70), (70, 80), (150, 90)):  # too long to be merged
        batches.append(run_of(start, count))
    if failing == "copy":
        monkeypatch.setattr(Run, "joined", lambda run, _: fails(run))
    with pytest.raises(MemoryError):
        batches.pop(1)
    monkeypatch.undo()
    assert len(batches) == 240
    found: list[int] = []
    while (batch := batches.pop(1)) is not None:
        found += numbers(batch)
    assert found == [*range(240)]
    assert len(batches) == 0


@pytest.mark.parametrize(("number", "left"), [(0, 0), (1, 1), (5, 5), (7, 6), (8, 7), (100, 10)])
def test_what_is_dropped_is_dropped_from_every_run(number: int, left: int) -> None:
    batches = batches_of(run_of(0, 6), run_of(7, 4))
    batches.drop_from(number)
    assert len(batches) == left
    assert [item for run in popped(batches) for item in run] == [item for item in (0, 1, 2, 3, 4, 5, 7, 8, 9, 10) if item < number]


@pytest.mark.parametrize("left", [0, 5])
def test_s6_a_collection_that_takes_items_while_a_batch_is_cut(monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    """Copying items may start a garbage collection, and a `__del__` may send others of them, or stop their map."""
    batches = batches_of(run_of(0, 100), run_of(100, 50, weight=FRAME // 10))
    meanwhile: list[Run] = []
    part = Run.part

    def collecting(run: Run, first: int, end: int) -> Run:
        copied = part(run, first, end)
        if not meanwhile:
            meanwhile.append(copied)
            meanwhile.append(pop(batches, 8))
            batches.drop_from(140)
            if not left:
                batches.drop_from(0)
        return copied

    monkeypatch.setattr(Run, "part", collecting)
    cut = batches.pop(4)
    taken = numbers(meanwhile[1])
    assert taken == [*range(len(taken))]
    assert (cut is None) is not left
    found = taken + ([] if cut is None else numbers(cut)) + [number for numbers_ in popped(batches) for number in numbers_]
    assert found == ([*range(140)] if left else taken)
