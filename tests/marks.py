"""The start mark of a call, as its worker set it. For functions that run in workers."""

from percore._protocol.messages import MARK_WORDS
from percore._worker.context import current_context, of_id


def began() -> int:
    """When the call began that asks for it, in nanoseconds of the monotonic clock."""
    plain = current_context("a test").families.plain
    call_id = of_id.get()
    assert call_id is not None
    word = (call_id & plain._mask) * MARK_WORDS
    assert plain._marks[word] == call_id
    return int(plain._marks[word + 1])


def most_within(starts: list[int], seconds: float) -> int:
    """How many of these starts the fullest window of so many seconds holds."""
    starts = sorted(starts)
    most = first = 0
    for place, start in enumerate(starts):
        while start - starts[first] >= seconds * 1e9:
            first += 1
        most = max(most, place - first + 1)
    return most
