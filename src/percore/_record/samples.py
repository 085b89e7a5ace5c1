"""Samples of stacks: the texts of faulthandler and py-spy as frames of the user's code."""

import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple


class Frame(NamedTuple):
    """A function on a stack.

    Attributes:
        name: of the function, without its module; py-spy gives some qualified names.
        file: the path of its source; empty: it has none.
    """

    name: str
    file: str


Stack = tuple[Frame, ...]
"""The frames of a thread, the outermost one first."""


class Sample(NamedTuple):
    """Where a thread of a worker was, or that calls of a function waited there.

    Attributes:
        worker: the worker, as the recording shows it.
        stack: the user's frames. The first one is the function that percore has called.
        times: for how many samples it stands.
    """

    worker: str
    stack: Stack
    times: int


AWAITING: Final = Frame("(awaiting)", "")
"""Stands for the calls of a coroutine function that wait: they have no stack."""

_LINE: Final = re.compile(r'\s*File "(?P<file>.*)", line (?:\d+|\?+) in (?P<name>.+)')
_RAW: Final = re.compile(r"(?P<name>.+?) \((?P<file>[^()]*?)(?::\d+)?\)")
_STANDARD: Final = r"(asyncio/|concurrent/futures/|multiprocessing/|selectors\.py|threading\.py|runpy\.py|contextlib\.py)"
_START: Final = Frame("<module>", "<string>")
"""The program that a fork server or a worker is started with."""

_RUNTIME: Final = re.compile(rf"(^|/)percore/_|(^|/)uvloop/|/(lib/)?python3\.\d+t?/{_STANDARD}|^{_STANDARD}|^<frozen |^$")
"""The files of frames below the user's: percore's, those of the event loop, and what starts threads and processes."""


def of_user(stack: Sequence[Frame]) -> Stack:
    """Return the stack without the outermost frames that are percore's, the event loop's or the interpreter's."""
    for depth, frame in enumerate(stack):
        if frame != _START and not _RUNTIME.search(frame.file):
            return tuple(stack[depth:])
    return ()


def from_faulthandler(text: str) -> list[Stack]:
    """Return the user's part of the stack of each thread in which the user's code runs."""
    found = []
    for thread in text.split("\n\n"):
        matches = [_LINE.fullmatch(line) for line in thread.splitlines()]
        frames = [Frame(match["name"], match["file"]) for match in reversed(matches) if match is not None]
        if stack := of_user(frames):
            found.append(stack)
    return found


def from_py_spy(text: str) -> Iterator[tuple[Stack, int]]:
    """Yield the user's part of each stack of py-spy's raw format, and in how many samples it was."""
    for line in text.splitlines():
        path, _, count = line.rpartition(" ")
        frames = [_frame(word) for word in path.split(";")]
        if count.isdecimal() and (stack := of_user(frames)):
            yield stack, int(count)


def _frame(word: str) -> Frame:
    match = _RAW.fullmatch(word)
    return Frame(word, "") if match is None else Frame(match["name"], match["file"])
