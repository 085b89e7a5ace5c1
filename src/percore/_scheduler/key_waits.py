"""Callers that would wait for each other for ever, because each holds a key that another one wants.

A call that has made nested calls waits for them, and so it waits for the keys that they want. A key that is taken becomes free when
one of its holders ends. From this follows which calls can end: those that want no key, or only keys that become free. The others
form a knot, and wait for ever.

The rule assumes that a call waits for all its nested calls. One that would go on without one of them may be taken for a part of a
knot; one that waits for ever is always found.
"""

from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Generic, NamedTuple, TypeVar

C = TypeVar("C")


class Knot(NamedTuple, Generic[C]):
    """A caller in a knot, the key that it holds, and the keys that it waits for and never gets."""

    key: Hashable
    caller: C
    wanted: Collection[Hashable]


def knot(key: Hashable, holders: Callable[[Hashable], Iterable[C]], wanted: Callable[[C], Collection[Hashable]]) -> list[Knot[C]]:
    """Return the callers for which a call that wants `key` would wait for ever; none if it will get the key.

    Args:
        key: the key.
        holders: returns the calls that have taken a key; none if another call may take it, too.
        wanted: returns the keys that the nested calls of a call wait for, those of its nested calls' nested calls included.
    """
    held: dict[Hashable, list[C]] = {}
    wants: dict[C, set[Hashable]] = {}
    todo = [key]
    while todo:
        name = todo.pop()
        if name in held:
            continue
        held[name] = list(holders(name))
        for caller in held[name]:
            if caller not in wants:
                wants[caller] = set(wanted(caller))
                todo += wants[caller]
    free: set[Hashable] = set()
    while more := {
        name
        for name, callers in held.items()
        if name not in free and (not callers or any(wants[caller] <= free for caller in callers))
    }:
        free |= more
    if key in free:
        return []
    return [Knot(name, caller, wants[caller] - free) for name, callers in held.items() if name not in free for caller in callers]
