"""The names of keys: equal keys of users get one object, which stands for them from then on.

A user's `__hash__` and `__eq__` run where a key is given, in the code of whoever gives it, and nowhere else. Whatever happens to
the call later (its outcome, a death, a cancellation) handles the name alone, which is compared by identity. So a key that changes
after it was given, or whose methods raise, harms neither workers nor other calls.
"""

from collections.abc import Hashable
from typing import Final
from weakref import ref


class Name:
    """Stands for all keys that are equal to one. Two names are equal only if they are the same object."""

    __slots__ = ("__weakref__", "key_hash", "value")

    def __init__(self, value: Hashable, key_hash: int) -> None:
        self.value = value
        self.key_hash = key_hash
        """The hash of the key when it was given. An equal key that is given later, under a new name, finds the same worker by it.

        The name itself is hashed by identity, as any object: a call looks its name up in several dicts."""

    def __repr__(self) -> str:
        return repr(self.value)


class _Entry(ref[Name]):
    """A name in the table, which does not keep it alive, and the next one with the same hash."""

    __slots__ = ("key_hash", "next")

    key_hash: int
    next: "_Entry | None"


class Names:
    """The names that are in use. Whoever uses one holds it; a name that nobody holds is forgotten."""

    def __init__(self) -> None:
        # By hash, in chains, and not by key: to take a key out of a dictionary would run the user's code.
        self._entries: Final[dict[int, _Entry]] = {}

    def __len__(self) -> int:
        """How many names are in use."""
        count = 0
        for entry in list(self._entries.values()):
            following: _Entry | None = entry
            while following is not None:
                count += 1
                following = following.next
        return count

    def of(self, key: Hashable) -> Name:
        """The name of a key. Runs user code: its `__hash__` and `__eq__`.

        Raises:
            TypeError: the key is not hashable.
            Exception: whatever `__hash__` or `__eq__` raises.
        """
        key_hash = hash(key)
        while True:
            first = self._entries.get(key_hash)
            entry = first
            while entry is not None:
                name = entry()
                # The new key is asked first: that an older one is broken is not the fault of whoever gives this one.
                if name is not None and (key is name.value or key == name.value):
                    return name
                entry = entry.next
            if self._entries.get(key_hash) is first:
                break
            # `__eq__` has given keys of this hash a name meanwhile, or a name was forgotten: look again.
        name = Name(key, key_hash)
        entry = _Entry(name, self._forget)
        entry.key_hash = key_hash
        entry.next = first
        self._entries[key_hash] = entry
        return name

    def _forget(self, entry: _Entry) -> None:
        """Nobody holds this name any more. Runs no user code: it may be called in the midst of anything."""
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
