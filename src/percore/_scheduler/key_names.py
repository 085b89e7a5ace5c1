"""Names of keys: one object replaces all equal keys of a user.

A key's own `__hash__` and `__eq__` run only in the call that passes the key, so their errors reach that caller. All later code (for
outcomes, deaths and cancellations) uses the name, which is compared by identity. A key that changes later, or whose methods raise,
therefore affects neither workers nor other calls.
"""

from collections.abc import Hashable
from typing import Final
from weakref import ref


class Name:
    """The name of a key and of all keys equal to it. Two names are equal only if they are the same object."""

    __slots__ = ("__weakref__", "key_hash", "value")

    def __init__(self, value: Hashable, key_hash: int) -> None:
        self.value = value
        self.key_hash = key_hash
        """The hash that the key had when it was passed. An equal key with a new name thus gets the same worker.

        The name itself is hashed by identity, like any object, because a call looks its name up in several dicts."""

    def __repr__(self) -> str:
        return repr(self.value)


class _Entry(ref[Name]):
    """A weak reference to a name in the table, and the next entry with the same hash."""

    __slots__ = ("key_hash", "next", "plain")

    key_hash: int
    next: "_Entry | None"
    plain: str | int | None
    """The key, if it is in the table of plain keys."""


class Names:
    """The names in use. The table refers to names weakly: a name is forgotten when nothing else refers to it."""

    def __init__(self) -> None:
        # Chains by hash instead of a dictionary by key: removing a key from a dictionary would run the key's own methods.
        self._entries: Final[dict[int, _Entry]] = {}
        self._plain: Final[dict[str | int | None, _Entry]] = {}
        """The entries whose key is exactly a str or an int, by key: comparing these runs no user code. Saves half of a look-up."""

    def __len__(self) -> int:
        """Number of names in use."""
        count = 0
        for entry in list(self._entries.values()):
            following: _Entry | None = entry
            while following is not None:
                count += 1
                following = following.next
        return count

    def of(self, key: Hashable) -> Name:
        """Return the name of a key. This runs the key's own `__hash__` and `__eq__`.

        Raises:
            TypeError: the key is not hashable.
            Exception: any error of `__hash__` or `__eq__`.
        """
        is_plain = type(key) is str or type(key) is int
        if is_plain:
            try:
                name = self._plain[key]()  # type: ignore[index]
            except KeyError:
                pass
            else:
                if name is not None:
                    return name
        key_hash = hash(key)
        while True:
            first = self._entries.get(key_hash)
            entry = first
            while entry is not None:
                name = entry()
                # The new key is the left operand, so its `__eq__` is tried first: this caller should not get errors of older keys.
                if name is not None and (key is name.value or key == name.value):
                    return name
                entry = entry.next
            if self._entries.get(key_hash) is first:
                break
            # The table changed meanwhile: `__eq__` has made a name with this hash, or one was forgotten. Look again.
        name = Name(key, key_hash)
        entry = _Entry(name, self._forget)
        entry.key_hash = key_hash
        entry.next = first
        entry.plain = None
        self._entries[key_hash] = entry
        if is_plain:
            entry.plain = key  # type: ignore[assignment]
            self._plain[entry.plain] = entry
        return name

    def _forget(self, entry: _Entry) -> None:
        """Remove the entry of a name that was garbage collected.

        It may be called at any point of other code, so it runs no user code.
        """
        if self._plain.get(entry.plain) is entry:
            del self._plain[entry.plain]
        first = self._entries.get(entry.key_hash)
        if first is entry:
            if entry.next is None:
                del self._entries[entry.key_hash]
            else:
                self._entries[entry.key_hash] = entry.next
            return
        while first is not None:
            if first.next is entry:
                first.next = entry.next
                return
            first = first.next
