"""The program of the row short_programs: `python -m benchmarks.programs.short WAY` compiles modules on two workers.

It prints when it had the results. It stands for a formatter or `compileall -j2`: it imports what it needs, works for some tenths
of a second, and ends. Each way imports only its own library.
"""

from __future__ import annotations

import sys
import sysconfig
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.programs.compiling import compiled

if TYPE_CHECKING:
    from concurrent.futures import Executor

MODULES = 24


def main(way: str) -> None:
    folder = Path(sysconfig.get_path("stdlib"))
    paths = sorted(str(path) for path in folder.glob("*.py") if 20_000 < path.stat().st_size < 60_000)[:MODULES]
    with _executor(way) as executor:
        sizes = list(executor.map(compiled, paths))
    assert all(sizes)
    print(time.perf_counter())


def _executor(way: str) -> Executor:
    name, _, choice = way.partition(", ")
    import multiprocessing

    threads = 1 if choice == "max_threads=1" else None
    context = multiprocessing.get_context(choice) if choice and threads is None else None
    if name == "percore":
        import percore

        return percore.LoopPoolExecutor(2, context, max_threads=threads)
    from concurrent.futures import ProcessPoolExecutor

    return ProcessPoolExecutor(2, context)


if __name__ == "__main__":
    main(sys.argv[1])
