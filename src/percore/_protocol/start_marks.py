"""Start marks: where a worker notes which calls have begun. The notes outlive the worker, so its engine can tell how far each was.

A call's mark has MARK_WORDS words from index `place * MARK_WORDS` on, where the place is the call's id modulo the number of places:

    the call's id, written last: it makes the mark valid
    when the call began, in nanoseconds of the monotonic clock
    for a batch, how many of its items have begun
"""

from typing import Final, Protocol

MARK_WORDS: Final = 3


class StartMarks(Protocol):
    """The marks of one worker: unsigned words of 64 bits, such as a memoryview of shared memory."""

    def __len__(self) -> int: ...
    def __getitem__(self, word: int, /) -> int: ...
    def __setitem__(self, word: int, value: int, /) -> None: ...
