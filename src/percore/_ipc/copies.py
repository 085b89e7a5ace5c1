"""One process's copy of a shared object: built when it is first asked for, over memory that all processes read."""

import threading
from collections.abc import Callable
from typing import Any

from percore._ipc.leases import Leases

CLOSED = "the shared object was closed"


class Copy:
    """The object behind a handle, in this process."""

    def __init__(self, leases: Leases, payload: int, forgotten: Callable[[], None]) -> None:
        """`forgotten` is called once, in the loop: after `forget`, when nothing looks at the payload any more."""
        self._leases = leases
        self._payload = payload
        self._forgotten = forgotten
        self._building = threading.RLock()
        self._state = threading.Lock()  # for the two that follow
        self._views = 0
        self._is_given_up = False
        self._value: Any = None
        self._is_built = False

    def value(self) -> Any:
        """The object. Others that ask for it meanwhile wait.

        Raises:
            RuntimeError: it is given up.
            BaseException: whatever unpickling it raises; the next one who asks tries again.
        """
        if not self._is_built:
            with self._building:
                if not self._is_built:
                    return self._build()
        value = self._value
        if self._is_given_up:  # looked at afterwards: it was there, or is not
            raise RuntimeError(CLOSED)
        return value

    def _build(self) -> Any:
        with self._state:
            if self._is_given_up:
                raise RuntimeError(CLOSED)
            self._views += 1
        value = self._leases.receive_shared(self._payload, self._gone).load()
        with self._state:
            if not self._is_given_up:
                self._value, self._is_built = value, True
        return value

    def forget(self) -> None:
        """Give it up: nobody gets it any more. Those who have it keep it. In the loop, once."""
        with self._state:
            self._is_given_up = True
            is_seen = bool(self._views)
        self._value = None
        if not is_seen:
            self._forgotten()

    def _gone(self) -> None:
        with self._state:
            self._views -= 1
            is_over = self._is_given_up and not self._views
        if is_over:
            self._forgotten()
