"""Steps of percore on which other threads wait: a thread in the middle of one must not wait for a call.

A garbage collection may begin in any of them, and run a `__del__` of the user that waits for a nested call. The loop, or the thread
of another call, then waits for a lock that this thread holds, and the answer never comes. So such a wait is refused. Most steps run
for each message, and waits are rarer: a mark costs a step nothing, and the wait looks for marks.
"""

from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any, Final, TypeVar

T = TypeVar("T", bound=Callable[..., Any])

_marked: Final[dict[int, CodeType]] = {}
"""The code of all steps, by its identity: the hash of a code object takes as long as its bytecode."""


def step(of: T) -> T:
    """Mark a function, or all functions of a class, as steps. They run no code of the user."""
    _marked.update((id(one.__code__), one.__code__) for one in (of, *vars(of).values()) if isinstance(one, FunctionType))
    return of


def is_step(code: CodeType) -> bool:
    """Return whether this is the code of a step."""
    return id(code) in _marked


def is_in_step(frame: FrameType | None) -> bool:
    """Return whether a step was interrupted by the code that runs in this frame."""
    marked = _marked
    while frame is not None:
        if id(frame.f_code) in marked:
            return True
        frame = frame.f_back
    return False
