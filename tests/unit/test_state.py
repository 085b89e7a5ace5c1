"""percore.state(kind): which kinds it takes, and what it says of others."""

import abc
import pickle
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import pytest

import percore
from percore._worker.context import CurrentWorker, WorkerContext, of_task


class Abstract(abc.ABC):
    @abc.abstractmethod
    def read(self) -> bytes: ...


class Readable(Protocol):
    def read(self) -> bytes: ...


@runtime_checkable
class Sizable(Protocol):
    def __len__(self) -> int: ...


class Refusing(type):
    def __instancecheck__(cls, instance: object) -> bool:
        raise TypeError("not comparable")


class Refused(metaclass=Refusing):
    pass


@pytest.fixture(autouse=True)
def inside_a_worker() -> Iterator[None]:
    context = WorkerContext(CurrentWorker(0, 1, 1))
    context.enter({"a": 1})
    token = of_task.set(context)
    yield
    of_task.reset(token)


@pytest.mark.parametrize("kind", [dict, Mapping, Sizable, Readable, dict[str, int], Mapping[str, int], dict | None])
def test_what_is_a_class_in_a_wide_sense_is_a_kind(kind: Any) -> None:
    assert percore.state(kind) == percore.state() == {"a": 1}


@pytest.mark.parametrize(
    ("kind", "name"), [(list, "list"), (Abstract, "Abstract"), (list[int], "list[int]"), (str | None, "str | None")], ids=str
)
def test_the_state_is_of_another_kind(kind: Any, name: str) -> None:
    with pytest.raises(TypeError) as caught:
        percore.state(kind)
    assert str(caught.value) == f"the lifespan yields dict, not {name}"


@pytest.mark.parametrize("kind", ["dict", 5, len])
def test_what_is_no_class(kind: Any) -> None:
    with pytest.raises(TypeError) as caught:
        percore.state(kind)
    assert str(caught.value) == f"percore.state takes a class, such as aiohttp.ClientSession, not {kind!r}"


def test_what_a_check_raises_is_the_users() -> None:
    with pytest.raises(TypeError, match=r"^not comparable$"):
        percore.state(Refused)


def test_a_worker_is_a_value() -> None:
    worker, same = CurrentWorker(0, 1, 2, node="a"), CurrentWorker(0, 1, 2, node="a")
    assert (worker == same, hash(worker) == hash(same), worker != CurrentWorker(1, 1, 2, node="a"), worker != 0) == (True,) * 4
    assert repr(worker) == "CurrentWorker(index=0, generation=1, pid=2, node='a')"
    assert pickle.loads(pickle.dumps(worker)) == worker
    match worker:
        case CurrentWorker(index, generation, pid, sockets, node):
            assert (index, generation, pid, sockets, node) == (0, 1, 2, (), "a")
    with pytest.raises(AttributeError, match="cannot be changed"):
        worker.pid = 3
    with pytest.raises(AttributeError, match="cannot be changed"):
        del worker.pid
    assert worker.pid == 2
