"""What tests of shared objects have workers do."""

import asyncio
import gc
import os
import pickle
from pathlib import Path
from typing import Any

import percore
from percore import Shared
from tests import jobs

kept: list[Any] = []
built: list[int] = []


class Counted:
    """An object that tells how often it was built in this process."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        built.append(os.getpid())


class Unloadable:
    """It can be pickled, and raises when it is built."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _raise, ("this cannot be built",)


def _raise(text: str) -> None:
    raise ValueError(text)


class Asking:
    """An object whose unpickling calls `fn` in a thread, and waits for the result."""

    def __init__(self, fn: Any, *args: Any) -> None:
        self.asks = fn, *args

    def __reduce__(self) -> tuple[Any, ...]:
        return _ask, self.asks


class Answer:
    def __init__(self, text: str) -> None:
        self.text = text


def _ask(fn: Any, *args: Any) -> Answer:
    if asyncio._get_running_loop() is not None:
        return Answer("of the loop")
    return Answer(percore.current_runner().run_sync(fn, *args))


def text_of(shared: Shared[Any]) -> tuple[str, int]:
    return shared.value.text, id(shared.value)


async def atext_of(shared: Shared[Any]) -> tuple[str, int]:
    return text_of(shared)


def first(shared: Shared[Any], _other: Any) -> Any:
    return shared.value


def value_of(shared: Shared[Any]) -> Any:
    return shared.value


async def avalue_of(shared: Shared[Any]) -> Any:
    return shared.value


def item_of(shared: Shared[Any], key: Any) -> Any:
    return shared.value[key]


def keyed(key: Any, shared: Shared[Any]) -> Any:
    return shared.value[key]


def inside(box: dict[str, list[tuple[int, Shared[Any]]]]) -> Any:
    return [shared.value for _, shared in box["here"]]


def is_same_twice(shared: Shared[Any]) -> bool:
    return shared.value is shared.value


def builds(shared: Shared[Counted]) -> tuple[str, int, int]:
    """The text, this worker, and how often it has built the object."""
    text = shared.value.text
    return text, percore.current_worker().pid, len(built)


def back(shared: Shared[Any]) -> list[Any]:
    return [shared]


def keep(shared: Shared[Any]) -> None:
    """Keep the handle beyond the call."""
    kept.append(shared)


def keep_value(shared: Shared[Any]) -> None:
    """Keep the object beyond the call."""
    kept.append(shared.value)


def kept_value() -> Any:
    return kept[-1].value


def kept_sum() -> float:
    return float(kept[-1].sum())


def let_go() -> None:
    kept.clear()
    gc.collect()


def close(shared: Shared[Any]) -> None:
    shared.close()


def wait_and_sum(log: str, gate: str, shared: Shared[Any]) -> float:
    jobs.say(log, "runs")
    jobs.pass_gate(gate)
    return float(shared.value.sum())


def write_to(shared: Shared[Any]) -> None:
    shared.value[0] = 1


def force_writable(shared: Shared[Any]) -> None:
    shared.value.flags.writeable = True


def pages_of(shared: Shared[Any]) -> tuple[int, int, int]:
    """Bytes of the object's pages that are resident here, this process's share of them, and those it has to itself."""
    array = shared.value
    array.sum()  # touches every page
    address = array.__array_interface__["data"][0]
    fields: dict[str, int] = {}
    is_here = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        head = line.split()
        if "-" in head[0] and not head[0].endswith(":"):
            start, end = (int(part, 16) for part in head[0].split("-"))
            is_here = start <= address < end
        elif is_here:
            fields[head[0].rstrip(":")] = int(head[1]) * 1024 if head[1].isdigit() else 0
    return fields["Rss"], fields["Pss"], fields["Private_Clean"] + fields["Private_Dirty"]


_pickled: list[bytes] = []


def keep_pickle(shared: Shared[Any]) -> int:
    """Pickle the handle and keep that; return its size."""
    _pickled.append(pickle.dumps(shared))
    return len(_pickled[0])


def load_pickle() -> Any:
    """Unpickle what was kept."""
    return pickle.loads(_pickled.pop())


def next_number() -> int:
    """The number of the next object that a runner of this process shares."""
    from percore._calls import shared_objects

    return next(shared_objects._numbers)


def size_with(array: Any, _number: int) -> int:
    return len(array)


def keep_array(array: Any) -> int:
    """Keep views of its arguments, as long as the worker lives."""
    kept.append(array)
    return int(array[0])
