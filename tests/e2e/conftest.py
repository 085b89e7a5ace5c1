"""What tests with real processes ask for."""

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from tests.faults import Wire


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    with closing(Wire(tmp_path / "wire")) as wire:
        yield wire


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Wire]:
    with closing(Wire(tmp_path / "gate")) as gate:
        yield gate


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Plan what workers do at their points; those of runners that are started afterwards."""
    return partial(monkeypatch.setenv, "PERCORE_POINTS")
