"""percore.testing.simulate: virtual time, chance from a seed, and what it finds."""

import asyncio
import os
import subprocess
import sys
import time
from typing import Any

import pytest

import percore
import percore.testing
from percore._supervisor import rates
from tests.e2e import simulated


def run_in_a_process(seed: int, hash_seed: str) -> str:
    command = [sys.executable, "-m", "tests.e2e.simulated", str(seed)]
    return subprocess.run(
        command, env=os.environ | {"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True
    ).stdout


def test_the_same_seed_gives_the_same_run_in_every_process_and_another_seed_another_one() -> None:
    first, again, other = run_in_a_process(3, "1"), run_in_a_process(3, "2"), run_in_a_process(4, "1")
    assert first == again
    assert first != other
    assert "(0, " in first


def test_no_call_is_lost_over_the_deaths_of_many_seeds() -> None:
    for seed in range(2):
        *seen, parsed, figures = percore.testing.simulate(simulated.main, seed=seed, deaths=0.2)
        numbers = [one[0] for one in seen if isinstance(one, tuple)]
        assert numbers[:40] == list(range(40)), seed
        assert sorted(numbers[40:]) == list(range(30)), seed
        assert parsed == 4
        assert isinstance(figures, tuple)
        assert figures[:2] == (71, 0), seed


counter = 0


async def count_badly(delay: float) -> None:
    """Read, wait and write: what a program must not do."""
    global counter
    before = counter
    await asyncio.sleep(delay)
    counter = before + 1


async def program_with_a_race() -> None:
    global counter
    counter = 0
    async with percore.Runner(workers=2) as runner:
        calls = []
        for _ in range(3):
            calls.append(runner.submit(count_badly, 0.001))
            await asyncio.sleep(0.006)
        await asyncio.gather(*calls)
    assert counter == 3


def fails(seed: int) -> bool:
    try:
        percore.testing.simulate(program_with_a_race, seed=seed)
    except AssertionError:
        return True
    return False


def test_a_race_of_the_program_shows_with_some_seeds_which_repeat_it() -> None:
    failing = {seed for seed in range(30) if fails(seed)}
    assert 0 < len(failing) < 30
    with pytest.raises(AssertionError) as failed:
        percore.testing.simulate(program_with_a_race, seed=min(failing))
    assert f"seed={min(failing)}" in failed.value.__notes__[0]


def test_a_program_that_waits_for_nothing_is_told() -> None:
    async def main() -> None:
        async with percore.Runner(1):
            await asyncio.Event().wait()

    with pytest.raises(percore.testing.Hangs, match="something that never comes"):
        percore.testing.simulate(main, seed=0)


def clock() -> Any:
    """What a module of percore's takes for the system's clock."""
    return vars(rates)["monotonic"]


def test_clocks_and_runners_are_as_before() -> None:
    async def main() -> "tuple[float, float]":
        loop = asyncio.get_running_loop()
        assert clock()() == loop.time()
        begun = loop.time()
        with pytest.raises(TimeoutError):
            async with percore.Runner(1) as runner:
                await runner.options(timeout=3600).run(asyncio.sleep, 7200)
        return begun, loop.time()

    begun, ended = percore.testing.simulate(main, seed=1)
    assert 3600 <= ended - begun < 3602
    assert clock() is time.monotonic
    assert percore.Runner._make_engine is None


def deaths_of_idle_workers(every: float) -> bool:
    """Kill an idle runner's only worker twelve times, each time so many seconds after the last one. Return whether it goes on."""

    async def main() -> bool:
        async with percore.Runner(1) as runner:
            for _ in range(12):
                await asyncio.sleep(every)
                (worker,) = runner.statistics().workers
                if worker.state == "failed":
                    return False
                if worker.state == "ready":
                    percore.testing.kill(runner, 0)
            return await runner.run(abs, -1) == 1

    return percore.testing.simulate(main, seed=1)


def test_b1_workers_that_die_now_and_then_are_replaced_for_ever_and_those_that_die_at_once_are_given_up() -> None:
    assert deaths_of_idle_workers(every=61.0)
    assert not deaths_of_idle_workers(every=10.0)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"seed": "1"}, "seed must be an int"),
        ({"seed": 1, "deaths": -1}, "0 or more"),
        ({"seed": 1, "latency": 0}, "positive number"),
    ],
)
def test_wrong_arguments_are_told(wrong: "dict[str, object]", told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        percore.testing.simulate(simulated.main, **wrong)  # type: ignore[arg-type]
