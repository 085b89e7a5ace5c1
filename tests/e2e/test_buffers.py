"""Large buffers between real processes: no copy on receipt, no memory left, and deaths half way."""

import asyncio
import gc
import os
import random
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import percore
from percore._common.system import HAS_MEMFD
from tests import jobs
from tests.counts import LONG, times
from tests.faults import LIMIT, Program, Watch, Wire

np = pytest.importorskip("numpy")

from tests.contract import buffer_jobs as arrays  # noqa: E402
from tests.e2e import buffer_calls as calls  # noqa: E402
from tests.e2e.test_limits import available  # noqa: E402
from tests.internals import slots_used  # noqa: E402
from tests.rows import repeated_rows  # noqa: E402

pytestmark = pytest.mark.warm_fork_server(imports="numpy")

MEGABYTE = 1 << 20
GIGABYTE = 1 << 30
SOME = 64 * MEGABYTE
LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])

in_memfds = pytest.mark.skipif(
    not (HAS_MEMFD and Path("/proc/self/smaps").exists()), reason="without memfd or /proc nobody tells where an array lies"
)


def need(size: int) -> None:
    """Skip where there is less memory."""
    if available() < size:
        pytest.skip(f"this needs {size} bytes of memory: {available()} are available")


async def settled(runner: percore.Runner) -> None:
    """Wait until no slot is in use any more."""
    async with asyncio.timeout(LIMIT):
        while slots_used(runner):
            gc.collect()
            await runner.broadcast(calls.drop)


# No copy on receipt


@in_memfds
async def test_arguments_lie_in_shared_memory_where_they_arrive() -> None:
    array = np.ones(SOME // 8)
    async with percore.Runner(1) as runner:
        mapping, total = await runner.run(calls.mapping_when_read, array)
        assert total == len(array)
        assert "/memfd:percore" in mapping.name
        assert mapping.permissions == "rw-p"
        assert mapping.resident >= SOME
        assert mapping.private < MEGABYTE, "it has pages of its own"
        assert mapping.share < 0.6 * SOME, "nobody shares its pages"
        # Only the pages that are written to become its own.
        mapping, total = await runner.run(calls.mapping_when_written, array)
        assert total == len(array) - 2
        assert 0 < mapping.private < MEGABYTE
        await settled(runner)


@in_memfds
async def test_results_lie_in_shared_memory_where_they_arrive() -> None:
    async with percore.Runner(1) as runner:
        array = await runner.run(arrays.numbers, 0, SOME // 8)
        mapping, total = calls.mapping_when_read(array)
        assert total == sum(range(SOME // 8))
        assert "/memfd:percore" in mapping.name
        assert mapping.permissions == "rw-p"
        assert mapping.resident >= SOME
        assert mapping.private < MEGABYTE
        assert mapping.share < 0.6 * SOME
        del array


@pytest.mark.asyncio_only
@in_memfds
async def test_a_broadcast_takes_the_memory_of_one() -> None:
    array = np.ones(SOME // 8)
    async with percore.Runner(3) as runner:
        for mapping, total in await runner.broadcast(calls.mapping_when_read, array):
            assert total == len(array)
            assert mapping.private < MEGABYTE
            assert mapping.share < 0.55 * SOME
        await settled(runner)


@pytest.mark.asyncio_only
@in_memfds
async def test_frames_and_tables_arrive_right_and_are_not_copied_either() -> None:
    """All of them in one test and one worker: to import these libraries takes longer than everything else here."""
    pandas = pytest.importorskip("pandas")
    arrow = pytest.importorskip("pyarrow")
    polars = pytest.importorskip("polars")
    async with percore.Runner(1) as runner:
        await frames_of_pandas(runner, pandas)
        await tables_of_arrow(runner, arrow)
        texts = {"number": arrays.numbers(1), "text": ["some text", None] * (arrays.SIZE // 2)}
        for fn in (jobs.echo, jobs.aecho):
            assert (await runner.run(fn, polars.DataFrame(texts))).equals(polars.DataFrame(texts))
        await settled(runner)


async def frames_of_pandas(runner: percore.Runner, pandas: Any) -> None:
    texts = {"whole": np.arange(arrays.SIZE), "text": ["some text", "other text"] * (arrays.SIZE // 2)}
    sent = pandas.DataFrame({"number": arrays.numbers(1), "other": arrays.numbers(2), **texts})
    there = await runner.run(jobs.aecho, sent)
    pandas.testing.assert_frame_equal(there, sent)
    there.loc[:, "number"] = 0.0
    there["whole"] += 1
    assert arrays.is_numbers(1, sent["number"].to_numpy())
    pandas.testing.assert_frame_equal(await runner.run(jobs.echo, sent), sent)
    frame = await runner.run(jobs.aecho, pandas.DataFrame({"number": arrays.numbers(1, SOME // 8)}))
    mapping = calls.mapping_of(frame["number"].to_numpy())
    assert mapping is not None
    assert "/memfd:percore" in mapping.name


async def tables_of_arrow(runner: percore.Runner, arrow: Any) -> None:
    sent = arrow.table({"number": arrays.numbers(1), "text": ["some text", None] * (arrays.SIZE // 2)})
    for fn in (jobs.echo, jobs.aecho):
        there = await runner.run(fn, sent)
        assert there.equals(sent)
        there.validate(full=True)
    table = await runner.run(jobs.aecho, arrow.table({"number": arrays.numbers(1, SOME // 8)}))
    mapping = calls.mapping_of(table["number"].chunk(0).to_numpy(zero_copy_only=True))
    assert mapping is not None
    assert "/memfd:percore" in mapping.name


def filled_in_a_fork(array: Any) -> bool:
    """Whether a fork of this process could fill its copy of the array."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # numpy's threads are none that the fork needs
        pid = os.fork()
    if not pid:
        status = 1
        try:
            array[:] = 5
            status = 0 if np.all(array == 5) else 1
        finally:
            os._exit(status)
    return os.waitpid(pid, 0) == (pid, 0)


async def test_x5_a_fork_of_the_program_writes_into_its_own() -> None:
    async with percore.Runner(1) as runner:
        array = await runner.run(arrays.numbers, 1)
        assert filled_in_a_fork(array)
        assert arrays.is_numbers(1, array)
        del array
        await settled(runner)


# Bounds


@pytest.mark.long
@pytest.mark.asyncio_only
@in_memfds
async def test_ten_results_at_once_take_their_own_memory_and_no_more() -> None:
    count, size = times(3, 10), 100_000_000
    need(3 * count * size)
    async with percore.Runner(2) as runner:
        family = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
        before = calls.family_share(family)
        results = await asyncio.gather(*(runner.run(arrays.numbers, place, size // 8) for place in range(count)))
        for place, array in enumerate(results):
            assert arrays.is_numbers(place, array)
        del array
        assert calls.family_share(family) - before < (count + 1.5) * size
        results.clear()
        await settled(runner)
        for _ in range(2):  # the loop hears of it, and the workers with what they are sent next
            await asyncio.sleep(0)
            await runner.broadcast(calls.drop)
        # What is warm stays, 64 MiB at most in each map: here and in each of two workers.
        assert calls.family_share(family) - before < 2 * size + 3 * 64 * MEGABYTE


@pytest.mark.asyncio_only
@pytest.mark.parametrize("threads", [4])
async def test_a_stream_of_megabytes_stays_inside_its_bound(threads: int) -> None:
    """However slowly they are taken: those that wait for the consumer are 64 MiB, and one for each place at most."""
    count, most = 150, 64 + 2 * threads
    async with percore.Runner(1, threads=threads) as runner:
        taken = 0
        async for array in runner.map(calls.count_and_make, range(count), [MEGABYTE // 8] * count):
            assert arrays.is_numbers(taken, array)
            taken += 1
            made = -1
            while made != (made := (await runner.broadcast(calls.how_many_made))[0]):
                pass  # until nothing more comes by itself
            assert made - taken <= most
        assert (taken, made) == (count, count)
        del array


@pytest.mark.asyncio_only
@pytest.mark.parametrize("size", [SOME])
async def test_r4_arrays_for_which_there_is_no_room_fail_alone(size: int) -> None:
    async with percore.Runner(1) as runner:
        calls.lack_room(MEGABYTE)
        try:
            with pytest.raises(MemoryError, match="memory that is left"):
                await runner.run(arrays.describe, np.ones(size // 8))
            assert slots_used(runner) == 0
            assert await runner.run(arrays.is_numbers, 1, arrays.numbers(1))
        finally:
            calls.lack_room(None)
        await runner.run(calls.lack_room, MEGABYTE)
        with pytest.raises(MemoryError, match="memory that is left"):
            await runner.run(arrays.numbers, 0, size // 8)
        assert arrays.is_numbers(1, await runner.run(arrays.numbers, 1))
        await runner.run(calls.lack_room, None)
        assert arrays.is_numbers(1, await runner.run(arrays.numbers, 1, size // 8))
        await settled(runner)


@pytest.mark.asyncio_only
@pytest.mark.parametrize("size", [MEGABYTE])
async def test_r4_arrays_above_max_message_fail_alone(size: int) -> None:
    async with percore.Runner(1, max_message=size) as runner:
        with pytest.raises(percore.PayloadTooLarge):
            await runner.run(arrays.describe, np.ones(size // 8))
        with pytest.raises(percore.PayloadTooLarge):
            await runner.run(arrays.numbers, 0, size // 8)
        assert arrays.is_numbers(1, await runner.run(jobs.aecho, arrays.numbers(1)))
        await settled(runner)


# R1: every length


LENGTHS = [(1 << 31) + 1, 3 * GIGABYTE] if LONG else [SOME + 1]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.asyncio_only
@pytest.mark.parametrize("size", LENGTHS)
async def test_r1_lengths_that_need_more_than_31_bits_both_ways(size: int) -> None:
    need(3 * size + GIGABYTE)
    async with percore.Runner(1, max_message=8 * GIGABYTE) as runner:
        assert await runner.run(calls.change_marks, calls.marked(size), size)
        array = await runner.run(calls.marked, size)
        assert calls.change_marks(array, size)
        del array
        await settled(runner)


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.asyncio_only
async def test_r1_800_megabytes_there_and_back() -> None:
    size = times(80, 800) * 1_000_000
    need(4 * size)
    array = np.arange(size // 8, dtype=np.float64)
    checksum = calls.crc(array)
    async with percore.Runner(1) as runner:
        assert await runner.run(calls.crc, array) == checksum
        back = await runner.run(jobs.aecho, array)
        assert calls.crc(back) == checksum
        back[:] = 0
        assert calls.crc(array) == checksum
        del back
        await settled(runner)


# Deaths half way


@pytest.mark.parametrize("place", ["call.marked", "call.unpickled", "call.running", "outcome.stored"])
async def test_k3_a_worker_that_dies_with_arrays_on_their_way(place: str, points: Callable[[str], None]) -> None:
    """Wherever it dies: what is attempted again gets what was sent, and no slot stays behind."""
    points(f"worker.{place}=kill@3#0.1")
    async with percore.Runner(1) as runner:
        tried = runner.options(retries=2)
        for number in range(6):
            array = await tried.run(arrays.fill, 5.0, arrays.numbers(number))
            assert np.all(array == 5.0)
            assert await tried.run(arrays.use_up, number, arrays.numbers(number))
        assert runner.statistics().restarts == 1
        del array
        await settled(runner)


@pytest.mark.parametrize("fn", [calls.dies_when_written, calls.adies_when_written], ids=["plain", "coroutine"])
async def test_k3_a_worker_that_dies_while_it_writes_an_array(fn: Callable[..., Any]) -> None:
    async with percore.Runner(1) as runner:
        held = await runner.run(arrays.numbers, 7)
        with pytest.raises(percore.WorkerDied) as caught:
            await runner.run(fn, MEGABYTE)
        assert caught.value.started
        assert caught.value.exitcode == -signal.SIGBUS
        assert arrays.is_numbers(8, await runner.run(arrays.numbers, 8))
        assert arrays.is_numbers(7, held)
        del held
        await settled(runner)


async def test_k3_a_worker_that_dies_while_it_reads_an_array() -> None:
    async with percore.Runner(1) as runner:
        for _ in range(2):
            with pytest.raises(percore.WorkerDied) as caught:
                await runner.run(arrays.describe, calls.dies_when_read(MEGABYTE))
            assert caught.value.started
        assert await runner.run(arrays.is_numbers, 1, arrays.numbers(1))
        await settled(runner)


@pytest.mark.parametrize(
    ("loop", "way"),
    [("asyncio", "sends"), ("uvloop", "receives"), *repeated_rows(("uvloop", "sends"), ("asyncio", "receives"))],
)
def test_p1_a_program_that_dies_while_it_copies_leaves_nothing(loop: str, way: str, tmp_path: Path, gate: Wire) -> None:
    with program(tmp_path, "killed", loop, way, gate.path) as running:
        running.expect("ready")
        with Watch(running.descendants()) as descendants:
            assert len(descendants) > 2
            gate.give(1)
            assert running.end() == (-signal.SIGBUS if way == "sends" else -signal.SIGKILL)
            assert descendants.wait_gone(LIMIT) == []


def program(tmp_path: Path, *arguments: object) -> Program:
    return Program(*map(str, arguments), stderr=tmp_path / "stderr", module="tests.e2e.buffer_programs")


@pytest.fixture
def ends_well(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Starts a story, which has to end in order and silently."""
    started: list[Program] = []

    def start(*arguments: object) -> Program:
        started.append(program(tmp_path, *arguments))
        return started[-1]

    yield start
    for running in started:
        with running:
            assert running.end() == 0, running.stderr
        assert running.stderr == ""


# What is left


@in_memfds
@pytest.mark.parametrize("loop", ["uvloop"])
def test_no_memory_is_left_after_close(loop: str, ends_well: Callable[..., Program]) -> None:
    running = ends_well("gone_after_close", loop, 100)
    assert running.told("arrived") is True
    assert running.told("warm") <= 3 * 64 * MEGABYTE + MEGABYTE  # the arena, and the results of two workers
    assert running.told("grown") < 32 * MEGABYTE
    assert running.told("left") == []
    assert running.told("mapped") == []


@pytest.mark.parametrize("loop", ["asyncio"])
def test_under_a_limit_of_the_address_space_there_are_fewer_slots(loop: str, ends_well: Callable[..., Program]) -> None:
    running = ends_well("short_of_space", loop, 6000)
    assert 0 < running.told("slots") < 10
    for word in ("back", "there", "there", "kept"):
        assert running.told(word) is True
    running.expect("end")


# All of it together


SIZES = [(0, 1000), (1000, 60_000), (60_000, 110_000), (110_000, 400_000), (400_000, 3_000_000)]


@pytest.mark.long
@pytest.mark.timeout(3000)
@pytest.mark.asyncio_only
async def test_s7_echoes_of_every_size_while_slots_are_held_at_random() -> None:
    chance = random.Random(7)
    base = np.frombuffer(chance.randbytes(4 * MEGABYTE), np.uint8)
    held: list[tuple[Any, int]] = []

    def thing(low: int, high: int) -> Any:
        size, start = chance.randint(low, high), chance.randrange(MEGABYTE)
        data = base[start : start + size]
        return data.tobytes() if chance.random() < 0.3 else data

    async def echo() -> None:
        data = thing(*chance.choices(SIZES, [50, 25, 15, 9, 1])[0])
        expected = calls.crc(data)
        there = await runner.run(calls.echo_checked, expected, data)
        assert type(there) is type(data)
        assert calls.crc(there) == expected
        if isinstance(there, np.ndarray):
            held.append((there, expected))

    async with percore.Runner(2) as runner:
        for _ in range(times(3000, 1_000_000) // 50):
            await asyncio.gather(*(echo() for _ in range(50)))
            while len(held) > chance.randint(0, 120):
                there, expected = held.pop(chance.randrange(len(held)))
                assert calls.crc(there) == expected, "it has changed while it was held"
        for there, expected in held:
            assert calls.crc(there) == expected
        del there
        held.clear()
        await settled(runner)
