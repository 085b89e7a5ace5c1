"""What a program shows at a terminal."""

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence

WIDTH = "160"


def shown_at_terminal(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Run a program to its end with a terminal as its outputs: its exit code, and everything that it wrote there."""
    ours, theirs = os.openpty()
    try:
        environment = {**environment, "TERM": "xterm", "COLUMNS": WIDTH}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment)
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    with process, open(ours, "rb", buffering=0) as terminal:
        written = []
        with contextlib.suppress(OSError):  # EIO: nobody has the other end any more
            while data := terminal.read(65536):
                written.append(data)
        return process.wait(), b"".join(written).decode()
