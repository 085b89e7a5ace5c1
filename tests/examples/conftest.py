"""Fixtures of the examples' tests."""

import pytest

from tests.rows import repeats


@pytest.fixture(params=[["--workers", "2"], *repeats(["--single"])], ids=["percore", "single"])
def mode(request: pytest.FixtureRequest) -> list[str]:
    """The arguments of the crawler: on workers, or as one plain process."""
    arguments: list[str] = request.param
    return arguments
