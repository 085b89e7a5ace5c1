"""Four tasks of file work at once: a temporary file of 10, 50 and 200 MiB each, written and read.

The sizes of the comparison that this follows; see benchmarks/_kinds.py for what is measured. The files fit into the
system's cache, so that this is copying and not the disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks._kinds import Kind, row_of
from benchmarks.kinds import write_and_read

if TYPE_CHECKING:
    from benchmarks._harness import Row


def row(*, quick: bool) -> Row:
    scale = 2 << 20 if quick else 10 << 20
    return row_of(Kind("file", write_and_read, [scale, 5 * scale, 20 * scale]), quick=quick, seconds=45)
