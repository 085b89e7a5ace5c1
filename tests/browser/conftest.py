"""What differs for tests that share one browser and one runner."""

from collections.abc import Iterator

import pytest

from tests import leaks


@pytest.fixture(autouse=True, scope="module")
def nothing_left() -> Iterator[None]:
    """Fail if a process, thread, descriptor or memfd is left when all have run. One test alone replaces workers and pages."""
    before = leaks.snapshot()
    yield
    left = leaks.since(before)
    if left:
        pytest.fail("the tests left behind:\n  " + "\n  ".join(left), pytrace=False)
