"""The stacks of threads of this process, written as faulthandler writes those of a process."""

import sys
from collections.abc import Iterable
from types import FrameType

from percore._protocol.interfaces import Condition


def condition_of(loop: int | None, idents: Iterable[int]) -> Condition:
    """Return what the stacks of these threads tell of a worker. `loop`: the one that runs its loop."""
    from percore._engines.processes import examination  # needed seldom

    frames = sys._current_frames()
    stacks = "\n\n".join(_stack(ident, frames[ident]) for ident in idents if ident in frames)
    return examination.condition_of(stacks, _head(loop or 0))


def _head(ident: int) -> str:
    return f"Thread 0x{ident:016x}"


def _stack(ident: int, frame: FrameType | None) -> str:
    lines = [f"{_head(ident)} (most recent call first):"]
    while frame is not None:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
        frame = frame.f_back
    return "\n".join(lines)
