"""This program's connection to a Ray cluster, which its runners share."""

import asyncio
import logging
import os
import socket
import threading
from typing import Final

from percore._common.log import report
from percore._monitor.threads import in_thread
from percore._transport.certificates import Certificates

THREAD: Final = "percore-ray"
"""The name of the threads that wait for Ray."""

_REACH: Final = 10.0
"""Seconds in which the address of a cluster has to take a connection."""

_CLOSE: Final = 10.0
"""Seconds that Ray has to disconnect the program."""

_lock: Final = threading.Lock()
_users: Final[list["RayConnection"]] = []
"""Those that are open, if the first of them has connected the program. If another part of the program has: none."""


def certificates() -> Certificates | None:
    """Return the certificates that Ray uses in this process. None: it runs without TLS."""
    if os.environ.get("RAY_USE_TLS", "").lower() not in ("1", "true"):
        return None
    return Certificates(*(os.environ[f"RAY_TLS_{name}"] for name in ("SERVER_CERT", "SERVER_KEY", "CA_CERT")))


class RayConnection:
    """One user of the connection. The last one to close it disconnects the program, unless another part of it has connected it."""

    def __init__(self, address: str, namespace: str | None) -> None:
        self._address = address
        self._namespace = namespace
        self._is_closed = False

    async def open(self) -> None:
        """Connect this program, unless it is connected. It may take for ever.

        Raises:
            OSError, RuntimeError, ValueError: the cluster cannot be used.
        """
        await in_thread(THREAD, self._open)

    def _open(self) -> None:
        import ray

        with _lock:
            is_ours = bool(_users)
            if not ray.is_initialized():
                self._connect()
                is_ours = True
            elif (mode := ray.get_runtime_context().worker.mode) != ray.SCRIPT_MODE:
                raise RuntimeError("this is a Ray task or actor" if mode == ray.WORKER_MODE else "this is a Ray client (ray://)")
            if is_ours:
                _users.append(self)
        if self._is_closed:  # nobody waits any more
            self._disconnect()

    def _connect(self) -> None:
        import ray

        address = os.environ.get("RAY_ADDRESS", "") if self._address == "auto" else self._address
        host, _, port = address.rpartition(":")
        if host and port.isdigit():  # to a port where nobody listens, Ray tries to connect for minutes
            socket.create_connection((host.strip("[]"), int(port)), _REACH).close()
        log = logging.getLogger("ray._private.worker")
        log.addFilter(_is_of_use)
        try:
            ray.init(self._address, namespace=self._namespace, configure_logging=False)
        except BaseException:
            ray.shutdown()  # of the half that was connected
            raise
        finally:
            log.removeFilter(_is_of_use)

    async def aclose(self) -> None:
        """Idempotent. An `open` under way, which may hold the lock for ever, disconnects at its end; so does a Ray that hangs."""
        self._is_closed = True
        if self in _users:
            try:
                async with asyncio.timeout(_CLOSE):
                    await in_thread(THREAD, self._disconnect)
            except TimeoutError:
                report(logging.WARNING, "Ray did not disconnect this program within %g s: it goes on in a thread", _CLOSE)

    def _disconnect(self) -> None:
        import ray

        with _lock:
            if self in _users:
                _users.remove(self)
                if not _users:
                    ray.shutdown()


def _is_of_use(record: logging.LogRecord) -> bool:
    """Leave out that Ray handles no SIGTERM, as in any thread but the main one: the program handles it as before."""
    return not record.getMessage().startswith("SIGTERM handler is not set")
