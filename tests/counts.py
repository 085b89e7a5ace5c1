"""How often a test does what it does over and over: a few times in `make test`, as often as was promised in `make long`."""

import os
from typing import Final

LONG: Final = bool(os.environ.get("PERCORE_LONG"))


def times(short: int, full: int) -> int:
    """The count of this run. Tests that ask carry the mark `long`."""
    return full if LONG else short
