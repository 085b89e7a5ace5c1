"""The function that an executor's `map` calls in a worker if `chunksize` puts several items into one call."""

from collections.abc import Callable, Sequence
from typing import Any


def run_chunk(fn: Callable[..., Any], chunk: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Call `fn` for each item of the chunk and return the results. The first exception propagates."""
    return [fn(*args) for args in chunk]
