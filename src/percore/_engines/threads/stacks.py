"""The stacks of threads of this process, written as faulthandler writes those of a process."""

import sys
from collections.abc import Iterable
from types import FrameType


def stacks_of(idents: Iterable[int]) -> str:
    """Return the stacks of these threads, without percore's frames below the user's."""
    from percore._engines.processes.examination import without_own  # needed seldom

    frames = sys._current_frames()
    return without_own("\n\n".join(_stack(ident, frames[ident]) for ident in idents if ident in frames))


def _stack(ident: int, frame: FrameType | None) -> str:
    lines = [f"Thread 0x{ident:016x} (most recent call first):"]
    while frame is not None:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
        frame = frame.f_back
    return "\n".join(lines)
