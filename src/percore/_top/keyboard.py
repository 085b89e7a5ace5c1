"""Single keys from the terminal, without waiting for the end of a line."""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def single_keys() -> Iterator[None]:
    """Pass on each key at once and do not show it, until the block ends. Ctrl-C raises KeyboardInterrupt as before."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def key_within(seconds: float) -> str:
    """Return the next key, or an empty string if none was pressed within so many seconds."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        ready, _, _ = select.select([sys.stdin], [], [], min(left, 3600.0))
        if ready:
            pressed = os.read(sys.stdin.fileno(), 1).decode(errors="replace")
            return pressed or "q"  # the terminal has gone
    return ""
