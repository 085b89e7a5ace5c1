"""The actor of a node: it starts the host there, and the host ends with it. Ray imports this module in the actor's process."""

import os
import select
import sys
import threading
from contextlib import suppress

from percore._places.host_process import HostProcess
from percore._places.ray_connection import THREAD, certificates


class Keeper:
    """The actor of a node. Its host ends when this process or the raylet does, which Ray notices a second later."""

    def start(self, address: str, token: bytes) -> int | None:
        """Start the host and return its port. None: it has ended."""
        import ray

        theirs = os.path.dirname(ray.__file__)  # Ray puts its own copies of psutil and others first
        path = [part for part in sys.path if not part.startswith(theirs)]
        self._host = HostProcess(sys.executable, address, path, certificates())
        port = self._host.port(token)
        threading.Thread(target=self._end_with_the_raylet, name=THREAD, daemon=True).start()
        return port

    def _end_with_the_raylet(self) -> None:
        with suppress(OSError):  # in a container of its own it has another number
            raylet = os.pidfd_open(int(os.environ.get("RAY_RAYLET_PID") or os.getppid()))
            gone = select.poll()
            gone.register(raylet, select.POLLIN)
            gone.poll()
            self._host.close()
