"""The programs of the row tools: `python -m benchmarks.programs.tools TOOL WAY FOLDER` runs a tool on a folder, with two workers.

The tools have a ProcessPoolExecutor of their own. Here they get another one in its place. Nothing else of them changes.
"""

from __future__ import annotations

import concurrent.futures
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

CODEMOD = "convert_format_to_fstring.ConvertFormatStringCommand"
MODULES = {
    "compileall": ["compileall"],
    "yapf": ["yapf"],
    "libcst": ["libcst.codemod._cli", f"libcst.codemod.commands.{CODEMOD.partition('.')[0]}"],
}
"""The modules of the functions that each tool submits, and of their arguments."""


def main(tool: str, way: str, folder: str) -> int:
    concurrent.futures.ProcessPoolExecutor = _maker(tool, way)  # type: ignore[assignment, misc]
    if tool == "compileall":
        import compileall

        return 0 if compileall.compile_dir(folder, quiet=1, force=True, workers=2) else 1
    if tool == "yapf":
        import yapf

        return 0 if yapf.main(["yapf", "--parallel", "--diff", "--recursive", folder]) == 1 else 1  # 1: something would be changed
    import libcst.tool

    return libcst.tool.main("libcst", ["codemod", "-j2", "--unified-diff", "--no-format", "--hide-progress", CODEMOD, folder])


def _maker(tool: str, way: str) -> Callable[..., Executor]:
    """Return what makes the executor, whatever number of workers it is asked for."""
    name, _, choice = way.partition(", ")
    options: dict[str, Any] = {}
    if choice.startswith("max_threads="):
        options["max_threads"] = int(choice.partition("=")[2])
    elif choice == "preload":
        import multiprocessing

        multiprocessing.set_forkserver_preload(MODULES[tool])
    elif choice:
        import multiprocessing

        options["mp_context"] = multiprocessing.get_context(choice)
    if name == "percore":
        import percore

        return lambda max_workers=None: percore.LoopPoolExecutor(2, **options)
    from concurrent.futures.process import ProcessPoolExecutor

    return lambda max_workers=None: ProcessPoolExecutor(2, **options)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
