"""The program that runs the untitled blocks of a page, as a user would type them: `__main__` is a prompt's and has no file.

The story of a page starts it by `python -c`, and executes this source with two names: `main`, the namespace of `__main__`, and
`answers`, the descriptor for the answers. Each line on standard input is a JSON block. Each answer is a pair: the traceback of an
error, or an empty string, and what the block has printed.
"""

import ast
import asyncio
import contextlib
import doctest
import io
import json
import os
import sys
import traceback
from typing import Any

main: dict[str, Any] = globals()["main"]
answers: int = globals()["answers"]


async def run_python(block: dict[str, Any]) -> None:
    source = "\n" * (block["line"] - 1) + block["text"]
    code = compile(source, block["page"], "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    awaitable = eval(code, main)  # only a block that awaits gives a coroutine
    if awaitable is not None:
        await awaitable


def run_pycon(block: dict[str, Any]) -> None:
    test = doctest.DocTestParser().get_doctest(block["text"], main, "block", block["page"], block["line"] - 1)
    test.globs = main  # in place of a copy
    report = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.REPORT_NDIFF, verbose=False)
    runner.run(test, out=report.write, clear_globs=False)
    if runner.failures:
        raise AssertionError(report.getvalue())


def answer(error: str, printed: str = "") -> None:
    sys.stdout.flush()
    os.write(answers, json.dumps([error, printed]).encode() + b"\n")


async def serve() -> None:
    """Between two blocks the loop runs, as at the prompt of `python -m asyncio`."""
    main["asyncio"] = asyncio
    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                await run_python(json.loads(line))
        except Exception:
            answer(traceback.format_exc())
        else:
            answer("", printed.getvalue())


def serve_pycon() -> None:
    """No loop runs here, as at the prompt of `python`."""
    for line in sys.stdin:
        try:
            run_pycon(json.loads(line))
        except AssertionError as error:
            answer(str(error))
        else:
            answer("")


if sys.argv[-1] == "pycon":
    serve_pycon()
else:
    asyncio.run(serve())
