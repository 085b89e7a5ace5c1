"""The workers of an executor for libraries that look at the processes of a ProcessPoolExecutor, to count, watch or kill them."""

import signal
from contextlib import suppress

import psutil


class WorkerProcess:
    """A worker with the names of multiprocessing.Process."""

    def __init__(self, pid: int, index: int) -> None:
        self.pid = self.ident = pid
        self.name = f"percore worker {index}"
        try:
            self._process: psutil.Process | None = psutil.Process(pid)
        except psutil.NoSuchProcess:
            self._process = None

    def is_alive(self) -> bool:
        """Return whether the process has not ended."""
        with suppress(psutil.NoSuchProcess):
            return self._process is not None and self._process.status() != psutil.STATUS_ZOMBIE
        return False

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process has ended, or for `timeout` seconds."""
        with suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            if self._process is not None:
                self._process.wait(timeout)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._signal(signal.SIGKILL)

    def _signal(self, signum: int) -> None:
        with suppress(psutil.NoSuchProcess):
            if self._process is not None:
                self._process.send_signal(signum)
