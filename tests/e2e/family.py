"""All processes that descend from one program, whoever adopted them: known by a variable in the environment they inherit."""

import contextlib
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults import Watch

MARK = "PERCORE_TEST_FAMILY"


class Family:
    """Programs that are started within `marked`, and what descends from them."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex

    @contextlib.contextmanager
    def marked(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(MARK, self.mark)
            yield

    def alive(self, branch: str = "") -> list[int]:
        """Those that run, or are stopped. Who has only to be reaped, by whoever adopted it, has no environment any more.

        `branch`: of these those whose mark was made longer so.
        """
        sought = f"{MARK}={self.mark}{branch}{chr(0) if branch else ''}".encode()
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(OSError):
                if sought in Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(pid)
        return found

    def wait_gone(self, seconds: float, branch: str = "") -> list[int]:
        """Who is left after so many seconds."""
        deadline = time.monotonic() + seconds
        with Watch() as everybody:
            while alive := self.alive(branch):  # more than once: one that is just being born has no environment of its own yet
                for pid in alive:
                    everybody.add(pid)
                if everybody.wait_gone(max(0.0, deadline - time.monotonic())):
                    return self.alive(branch)
        return []
