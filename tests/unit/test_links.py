"""The memory that all workers of a runner share, and how theirs is cut: it fits into the address space, or is refused."""

import os
import sys
from contextlib import ExitStack, closing
from typing import Any, cast

import pytest

import percore
from percore._transport import links as module
from percore._transport.links import Links
from percore._transport.memory import Memory, has_address_space


def links_of(workers: int, max_message: int = 2**30) -> Links:
    """The memory of a runner, whose loop is not needed."""
    options = percore.Runner(workers=workers, max_message=max_message)._options
    return Links(cast("Any", None), options, 64, main_by_value=False)


def results_of(workers: int, max_message: int = 2**30) -> tuple[int, int]:
    """Slots of each worker for results, and the bytes of one."""
    with closing(links_of(workers, max_message)) as shared:
        return shared.layout.results_size // shared.layout.slot_size, shared.layout.slot_size


def test_a_few_workers_have_as_many_slots_as_they_may() -> None:
    assert results_of(2) == (64, 2**30)
    assert results_of(2, 1024) == (64, 2**20)


def test_as_many_workers_as_are_allowed_fit_with_their_successors() -> None:
    with ExitStack() as undo:
        shared = links_of(1024)
        undo.callback(shared.close)
        first = Memory.create(shared.layout.results_size)
        undo.callback(first.close)
        for _ in range(2 * 1024 - 1):
            memory = Memory.of_reader(os.dup(first.fd), shared.layout.results_size)
            undo.callback(memory.close)
            memory.close_fds()
            assert memory.own.readonly is (sys.platform != "linux")  # there it is mapped twice
        assert shared.layout.results_size // shared.layout.slot_size >= 4


@pytest.mark.parametrize(
    ("room", "slots"), [(4 * 8 * 64, 64), (4 * 8 * 64 - 1, 32), (4 * 8 * 4, 4), (4 * 8 * 3, 2), (4 * 8 * 1, 1), (8, 1)]
)
def test_the_smaller_the_address_space_the_fewer_slots(monkeypatch: pytest.MonkeyPatch, room: int, slots: int) -> None:
    monkeypatch.setattr(module, "has_address_space", lambda size: size <= room * 2**30)
    assert results_of(8) == (slots, 2**30)


def test_what_cannot_fit_is_refused_when_the_memory_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_address_space", lambda size: size < 8 * 2**30)
    with pytest.raises(OSError, match=r"no room for the results of 8 workers with max_message=1073741824 bytes: .*fewer workers"):
        results_of(8)


def test_address_space_is_asked_for_and_given_back() -> None:
    for _ in range(100):
        assert has_address_space(1 << 42)
    assert not has_address_space(1 << 62)
    assert not has_address_space(1 << 80)
