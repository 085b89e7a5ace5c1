"""Fixtures for tests of programs that use percore. In the conftest.py of the project's root folder:

pytest_plugins = ["percore.pytest_plugin"]
"""

from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import pytest

import percore.testing

__all__ = ["Simulate", "fake_runner", "simulate"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("percore")
    group.addoption("--percore-seed", type=int, metavar="SEED", help="the only seed that the fixture `simulate` tries")


@pytest.fixture
def fake_runner() -> percore.testing.FakeRunner:
    """A FakeRunner of two workers, not started: `async with fake_runner as runner`."""
    return percore.testing.FakeRunner(workers=2)


class Simulate(Protocol):
    """The fixture `simulate`."""

    def __call__(
        self, main: Callable[[], Coroutine[Any, Any, Any]], *, seeds: int = 100, deaths: float = 0.0, latency: float = 0.01
    ) -> None:
        """Run a program by `percore.testing.simulate` once with each of so many seeds.

        If it fails with one, the failure names the option of pytest that runs this seed alone.

        Args:
            main: a coroutine function without arguments.
            seeds: how many seeds, from 0.
            deaths: as for `percore.testing.simulate`.
            latency: as for `percore.testing.simulate`.
        """


@pytest.fixture
def simulate(request: pytest.FixtureRequest) -> Simulate:
    """Runs a program under virtual time, with many seeds: see `Simulate`."""
    chosen: int | None = request.config.getoption("--percore-seed")

    def run(main: Callable[[], Coroutine[Any, Any, Any]], *, seeds: int = 100, deaths: float = 0.0, latency: float = 0.01) -> None:
        for seed in range(seeds) if chosen is None else (chosen,):
            try:
                percore.testing.simulate(main, seed=seed, deaths=deaths, latency=latency)
            except BaseException as error:
                error.add_note(f"pytest {request.node.nodeid} --percore-seed={seed} runs it alone")
                raise

    return run
