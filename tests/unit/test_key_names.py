"""The names of keys: one for all that are equal, compared by identity, forgotten with the last who holds it."""

import gc
from decimal import Decimal
from typing import Any

import pytest

from percore._scheduler.key_names import Name, Names


class Key:
    """A key whose hash and equality count how often they are called, and do as they are told."""

    def __init__(self, value: int, key_hash: int = 7) -> None:
        self.value = value
        self.hash = key_hash
        self.calls = 0
        self.error: Exception | None = None

    def __hash__(self) -> int:
        self._called()
        return self.hash

    def __eq__(self, other: object) -> bool:
        self._called()
        return isinstance(other, Key) and self.value == other.value

    def _called(self) -> None:
        self.calls += 1
        if self.error is not None:
            raise self.error


def test_equal_keys_have_one_name() -> None:
    names = Names()
    for equal in ((1, 1.0, True, Decimal(1)), ("host", "".join(["ho", "st"])), (("a", 1), ("a", 1.0)), (Key(1), Key(1))):
        kept = [names.of(key) for key in equal]
        assert len({id(name) for name in kept}) == 1
        assert {name.key_hash for name in kept} == {hash(equal[0])}


@pytest.mark.parametrize("gone", range(4))
def test_keys_of_one_hash_have_names_of_their_own(gone: int) -> None:
    names = Names()
    kept: list[Any] = [names.of(Key(value)) for value in range(4)]
    assert len(set(kept)) == len(names) == 4
    assert [names.of(Key(value)) for value in range(4)] == kept
    kept[gone] = None
    assert len(names) == 3
    assert [names.of(Key(value)) for value in range(4) if value != gone] == [name for name in kept if name]
    assert names.of(Key(gone)) not in kept


def test_a_name_is_forgotten_with_the_last_who_holds_it() -> None:
    names = Names()
    for value in range(1000):
        names.of(("key", value))
    assert len(names) == 0
    name = names.of("key")
    again = names.of("key")
    del name
    assert names.of("key") is again
    del again
    assert len(names) == 0


def test_a_name_handles_its_key_no_more() -> None:
    names = Names()
    key = Key(1)
    table = {names.of(key): "there"}
    (name,) = table
    key.hash, key.error = 8, ZeroDivisionError()
    before = key.calls
    assert table[name] == "there"
    assert name != names.of(Key(2, 9))
    del table[name], name
    assert len(names) == 0
    assert key.calls == before


def test_what_the_methods_of_a_key_raise_is_raised_where_it_is_given() -> None:
    names = Names()
    with pytest.raises(TypeError):
        names.of([])  # type: ignore[arg-type]
    failing = Key(1)
    kept = names.of(failing)
    failing.error = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        names.of(failing)
    assert names.of(Key(1)) is kept  # it is the new key that is asked
    assert len(names) == 1


def test_an_equality_that_names_keys_itself() -> None:
    """While a key is looked for, its own equality gives an equal one a name."""
    names = Names()
    inner: list[Name] = []

    class Reentrant(Key):
        is_asked = False
        __hash__ = Key.__hash__

        def __eq__(self, other: object) -> bool:
            if not self.is_asked:
                self.is_asked = True
                inner.append(names.of(Key(2)))
                gc.collect()
            return Key.__eq__(self, other)

    first = names.of(Key(1))
    assert names.of(Reentrant(2)) is inner[0]
    assert names.of(Key(1)) is first
    assert len(names) == 2


def test_a_subclass_of_str_is_compared_by_its_own_methods() -> None:
    class Caseless(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            raise ZeroDivisionError

    names = Names()
    kept = names.of("host")
    with pytest.raises(ZeroDivisionError):
        names.of(Caseless("host"))
    assert names.of("host") is kept


@pytest.mark.parametrize("first", ["host", 1, 1.0, True])
def test_a_forgotten_name_leaves_no_entry(first: Any) -> None:
    names = Names()
    for _ in range(2):
        kept = [names.of(first), names.of(1), names.of("host")]
        assert len(names) == 2
        del kept
        assert len(names) == 0
        assert not names._plain
