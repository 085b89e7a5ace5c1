"""One process's copy of a shared object. It is built on first use, over memory that all processes read."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from percore._protocol.interfaces import Received


CLOSED = "the shared object was closed"


class Copy:
    """The object behind a `Shared` handle, in this process."""

    def __init__(self, load: "Callable[[int, Callable[[], None]], Received]", payload: int, forgotten: Callable[[], None]) -> None:
        """`load` is `Store.load`.

        `forgotten` is called once, in the loop, after `forget` and when no view of the payload is left.
        """
        self._load = load
        self._payload = payload
        self._forgotten = forgotten
        self._building = threading.RLock()
        self._state = threading.Lock()  # guards the next two attributes
        self._views = 0
        self._is_given_up = False
        self._value: Any = None
        self._is_built = False

    def value(self) -> Any:
        """Return the object, and build it on the first call. Other threads that call this meanwhile wait.

        Raises:
            RuntimeError: the object was given up.
            BaseException: any exception that unpickling raises. The next call tries again.
        """
        if not self._is_built:
            with self._building:
                if not self._is_built:
                    return self._build()
        value = self._value
        if self._is_given_up:  # checked after the value was read, because `forget` may have cleared it
            raise RuntimeError(CLOSED)
        return value

    def _build(self) -> Any:
        with self._state:
            if self._is_given_up:
                raise RuntimeError(CLOSED)
            self._views += 1
        value = self._load(self._payload, self._gone).load()
        with self._state:
            if not self._is_given_up:
                self._value, self._is_built = value, True
        return value

    def forget(self) -> None:
        """Give the object up: `value` raises from now on. Objects already returned stay valid. Call this once, in the loop."""
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
