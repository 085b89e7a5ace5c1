"""Samples of stacks: the texts of faulthandler, py-spy and profiling.sampling as frames of the user's code."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple


class Frame(NamedTuple):
    """A function on a stack.

    Attributes:
        name: of the function, without its module; some samplers give qualified names.
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
        call: the call, as the recording shows it; empty: any.
    """

    worker: str
    stack: Stack
    times: int
    call: str = ""


AWAITING: Final = Frame("(awaiting)", "")
"""Stands for the calls of a coroutine function that wait: they have no stack."""

_LINE: Final = re.compile(r'\s*File "(?P<file>.*)", line (?:\d+|\?+) in (?P<name>.+)')
_HEAD: Final = re.compile(r"(?:Current t|T)hread (?P<id>0x[0-9a-f]+)")
_RAW: Final = re.compile(r"(?P<name>.+?) \((?P<file>[^()]*?)(?::\d+)?\)")
_COLLAPSED: Final = re.compile(r"(?P<file>.*):(?P<name>[^:]*):-?\d+")
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


def from_faulthandler(text: str) -> list[tuple[str, Stack]]:
    """Return each thread in which the user's code runs, with the user's part of its stack."""
    found = []
    for thread in text.split("\n\n"):
        head, *lines = thread.splitlines() or [""]
        matches = [_LINE.fullmatch(line) for line in lines]
        frames = [Frame(match["name"], match["file"]) for match in reversed(matches) if match is not None]
        if stack := of_user(frames):
            named = _HEAD.match(head)
            found.append((f"Thread {named['id']}" if named else head, stack))
    return found


def from_py_spy(text: str) -> Iterator[tuple[str, Stack, int]]:
    """Yield the thread, the user's part of each stack of py-spy's raw format with threads, and in how many samples it was."""
    for line in text.splitlines():
        path, _, count = line.rpartition(" ")
        thread, *words = path.split(";")
        if count.isdecimal() and (stack := of_user([_frame(word) for word in words])):
            yield thread.partition(":")[0].capitalize(), stack, int(count)


def _frame(word: str) -> Frame:
    match = _RAW.fullmatch(word)
    return Frame(word, "") if match is None else Frame(match["name"], match["file"])


def from_sampling(text: str, paths: Mapping[tuple[str, str], str]) -> Iterator[tuple[str, Stack, int]]:
    """Yield the same of the collapsed format of profiling.sampling. `paths`: by the last part of a path, and the function."""
    for line in text.splitlines():
        path, _, count = line.rpartition(" ")
        thread, *words = path.split(";")
        matches = [_COLLAPSED.fullmatch(word) for word in words]
        frames = [
            Frame(match["name"], paths.get((match["file"], match["name"]), match["file"])) for match in matches if match is not None
        ]
        if count.isdecimal() and (stack := of_user(frames)):
            yield thread.replace("tid:", "Thread "), stack, int(count)


def paths_in(text: str) -> dict[tuple[str, str], str]:
    """Return the paths that the JSON lines of profiling.sampling name, by the last part of the path, and the function."""
    strings: dict[int, str] = {}
    found = {}
    for record in map(json.loads, text.splitlines()):
        strings |= {one["str_id"]: one["value"] for one in record.get("strings", ())}
        for one in record.get("frames", ()):
            path, name = strings[one["path_str_id"]], strings[one["func_str_id"]]
            found[path.rpartition("/")[2], name] = path
    return found
