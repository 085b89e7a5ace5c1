"""The process of one row: `python -m benchmarks._one_row NAME REQUEST OUTPUT`, started by _runs.

Nothing at the top imports what a row needs: processes that a peer spawns from here import this module again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(name: str, request: str, output: str) -> None:
    import asyncio

    import uvloop

    from benchmarks._harness import Wanted, measure
    from benchmarks._results import as_json
    from benchmarks._runs import row_of
    from benchmarks._verdicts import judge

    asked = json.loads(request)
    only = None if asked["only"] is None else frozenset(asked["only"])
    wanted = Wanted(asked["seconds"], asked["rounds"], only, asked["settings"], untried=asked["untried"])
    row = row_of(name, quick=asked["quick"])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(measure(row, wanted))
    Path(output).write_text(json.dumps(as_json(result, judge(row.targets, result))))


if __name__ == "__main__":
    main(*sys.argv[1:])
