"""What a call of an executor's `map` runs, where several items travel in one."""

from collections.abc import Callable, Sequence
from typing import Any


def run_chunk(fn: Callable[..., Any], chunk: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The results of these items, one after the other; the first error ends it."""
    return [fn(*args) for args in chunk]
