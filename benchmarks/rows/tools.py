"""Programs that people have, with percore's executor in place of their own."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.figures import Target
from benchmarks.harness import Row, row

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.harness import Round
    from benchmarks.results import Sample

_ROOT: Final = Path(__file__).parents[2]

_FILES: Final = {"compileall": (36, 20_000, 60_000), "yapf": (10, 4_000, 7_000), "libcst": (12, 4_000, 7_000)}
"""For each tool how many modules of the standard library it gets, and between how many bytes they have."""


@row(rounds=5, seconds=60)
def tools(quick: bool) -> Row:
    """Tools that work for some tenths of a second on two workers: compileall, `yapf --parallel`, a codemod of libcst.

    The time of the whole program, its start and imports included. libcst takes 0.3 s to import, which a fork of the program
    has and other workers do not. With "preload" the fork server imports the modules of the submitted functions. A tool that is
    not installed is left out.
    """
    ways = (
        *("percore", "percore, preload", "percore, max_threads=1", "percore, fork"),
        *("ProcessPoolExecutor, forkserver", "ProcessPoolExecutor, fork"),
    )
    found = [tool for tool in _FILES if importlib.util.find_spec(tool) is not None]
    return Row(
        {way: partial(_runs, found, way) for way in ways},
        [
            *(Target("percore", tool, "ProcessPoolExecutor, forkserver", at_most=1.1) for tool in found),
            *(Target("percore, fork", tool, "ProcessPoolExecutor, fork", at_most=1.1) for tool in found),
        ],
    )


@asynccontextmanager
async def _runs(tools: list[str], way: str) -> AsyncIterator[Round]:
    with tempfile.TemporaryDirectory() as folder:
        for tool in tools:
            _fill(Path(folder, tool), *_FILES[tool])

        async def once() -> Sample:
            return {tool: await asyncio.to_thread(_time, tool, way, Path(folder, tool)) for tool in tools}

        yield once


def _fill(folder: Path, count: int, least: int, most: int) -> None:
    folder.mkdir()
    modules = sorted(path for path in Path(sysconfig.get_path("stdlib")).glob("*.py") if least < path.stat().st_size < most)
    for path in modules[:count]:
        shutil.copy(path, folder)


def _time(tool: str, way: str, folder: Path) -> float:
    """Run a tool and return how many seconds it took."""
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    command = [sys.executable, "-m", "benchmarks.programs.tools", tool, way, str(folder)]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    done = subprocess.run(command, cwd=_ROOT, env=variables, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    count = len(list(folder.glob("*.py")))
    if tool == "compileall":
        is_right = len(list(folder.glob("__pycache__/*.pyc"))) == count
    elif tool == "yapf":
        is_right = done.stdout.count("(reformatted)") > count // 2
    else:
        is_right = f"Transformed {count} files successfully" in done.stdout + done.stderr
    if done.returncode or not is_right:
        raise RuntimeError(f"{tool} failed:\n{done.stdout[-2000:]}{done.stderr}")
    return seconds
