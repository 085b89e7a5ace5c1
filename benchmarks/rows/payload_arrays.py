"""numpy arrays of 80 kB to 80 MB, a pandas frame and an Arrow table there and back, 1 worker, one call at a time.

An array needs one copy each way and none on receipt: its limit is a bare echo that copies as often. The plot
(`--plots FOLDER`) shows the time over the size. See benchmarks/_payloads.py for how it is done; an array of 800 MB has a row
of its own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks._payloads import MEMCPY, Payload, array_of, is_same_array, memcpy, plot, row_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks._harness import Row

SIZES = {"80 kB": 80_000, "800 kB": 800_000, "8 MB": 8_000_000, "80 MB": 80_000_000}
CALLS = {"80 kB": 60, "800 kB": 20, "8 MB": 5, "80 MB": 1}
OF_POOL = {"80 kB": 0.45, "8 MB": 0.142}
OF_BARE = {"80 kB": 1.5, "8 MB": 1.5}
TABLE, OF_POOL_TABLE = 50_000_000, 0.142
"""Times ProcessPoolExecutor's; 0.142 is a seventh."""


def row(*, quick: bool) -> Row:
    arrays = [
        Payload(name, size, CALLS[name], partial(array_of, size), OF_POOL.get(name), OF_BARE.get(name), is_same_array)
        for name, size in SIZES.items()
    ]
    made = row_of([*arrays, *_tables()], quick=quick, seconds=8 if quick else 35, views=True)
    drawn = plot("A numpy array, there and back", SIZES)
    return replace(made, contestants={MEMCPY: partial(memcpy, arrays), **made.contestants}, draw=drawn)


def _tables() -> Iterator[Payload]:
    """Those that are installed."""
    if find_spec("pandas") is not None:
        yield Payload("pandas, 50 MB", TABLE, 1, _frame, OF_POOL_TABLE, is_same=_equals)
    if find_spec("pyarrow") is not None:
        yield Payload("Arrow, 50 MB", TABLE, 1, _table, OF_POOL_TABLE, is_same=_equals)


def _frame() -> Any:
    import pandas as pd

    return pd.DataFrame(_columns())


def _table() -> Any:
    import pyarrow as pa

    return pa.table(_columns())


def _columns() -> dict[str, Any]:
    numbers = np.arange(TABLE // 16)
    return {"number": numbers, "root": np.sqrt(numbers)}


def _equals(one: Any, other: Any) -> bool:
    return bool(one.equals(other))
