"""What tests have workers do with arrays. Imports numpy: not for workers that have none."""

import gc
import os
import pickle
import zlib
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from tests.jobs import apass_gate, pass_gate, say

SIZE = 20_000
"""Numbers of an array that travels beside its pickle: 160 kB."""

POINT = np.dtype([("x", "<f8"), ("name", "S7"), ("rgb", "u1", (3,))])

kept: list[Any] = []


def numbers(place: int, size: int = SIZE) -> "np.ndarray[Any, Any]":
    """An array of which no two places are alike, and no two neighbouring pages."""
    return np.arange(place, place + size, dtype=np.float64)


async def is_a_view(array: "np.ndarray[Any, Any]") -> bool:
    """Whether it lies in memory that is not its own, and may be written to."""
    return bool(array.flags.writeable and not array.flags.owndata)


async def anumbers(place: int, size: int = SIZE) -> "np.ndarray[Any, Any]":
    return numbers(place, size)


async def akeep_numbers(size: int) -> None:
    kept.append(numbers(0, size))


def is_numbers(place: int, array: Any) -> bool:
    """Whether it is what `numbers` has given."""
    return bool(array[0] == place and np.array_equal(array, numbers(place, len(array))))


def read_only(array: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    array.setflags(write=False)
    return array


def structured() -> "np.ndarray[Any, Any]":
    points = np.zeros(SIZE, POINT)
    points["x"] = np.arange(SIZE)
    points["name"] = b"point"
    points["rgb"][:, 1] = 200
    return points


ARRAYS: dict[str, Callable[[], Any]] = {
    "C": lambda: numbers(1).reshape(100, -1),
    "Fortran": lambda: np.asfortranarray(numbers(2).reshape(100, -1)),
    "structured": structured,
    "read-only": lambda: read_only(numbers(3)),
    "read-only Fortran": lambda: read_only(np.asfortranarray(numbers(4).reshape(-1, 8))),
    "zero-length": lambda: np.zeros((0, 7)),
    "small": lambda: np.arange(10),
    "no dimension": lambda: np.array(5.5),
    "strided": lambda: numbers(5)[::2],
    "reversed": lambda: numbers(6)[::-1],
    "columns": lambda: numbers(7).reshape(200, -1)[:, 3:50],
    "transposed in part": lambda: numbers(8).reshape(20, 50, 20).transpose(1, 0, 2),
    "dates": lambda: np.arange("2001-01-01", "2101-01-01", dtype="datetime64[D]"),
    "big-endian": lambda: numbers(9).astype(">f8"),
    "objects": lambda: np.array([{"a": 1}, None, "text"] * 5000, dtype=object),
    "bits": lambda: np.ones(100_000, bool),
}


def described(array: Any) -> tuple[Any, ...]:
    """What has to be the same after a journey."""
    flags = array.flags
    content = array.tolist() if array.dtype.hasobject else zlib.crc32(array.tobytes())
    return type(array), array.dtype, array.shape, flags.writeable, flags.c_contiguous, flags.f_contiguous, content


def is_same(there: tuple[Any, ...], sent: Any) -> bool:
    """Whether what is described is the array that was sent. What lies in steps arrives in one piece, in an order of numpy's."""
    whole = described(sent)
    return there == whole or (not sent.flags.forc and there[:4] + there[6:] == whole[:4] + whole[6:])


def describe(array: Any) -> tuple[Any, ...]:
    return described(array)


async def adescribe(array: Any) -> tuple[Any, ...]:
    return described(array)


def make_array(name: str) -> Any:
    return ARRAYS[name]()


async def amake_array(name: str) -> Any:
    return ARRAYS[name]()


def describe_view(view: Any) -> tuple[Any, ...]:
    return type(view), bytes(view), view.readonly, view.format, view.ndim


async def send_back(view: Any) -> Any:
    return pickle.PickleBuffer(view)


def make_view(data: bytes, writable: bool) -> Any:
    return pickle.PickleBuffer(bytearray(data) if writable else data)


def bare_view(size: int) -> Any:
    return {"view": [memoryview(bytes(size))]}


async def abare_view(size: int) -> Any:
    return memoryview(bytes(size))


# Writing


def use_up(place: int, array: Any) -> bool:
    """Whether it arrives right; everything in it is overwritten then."""
    is_right = is_numbers(place, array)
    array[:] = -1
    return is_right


async def ause_up(place: int, array: Any) -> bool:
    return use_up(place, array)


def fill(value: float, array: Any) -> Any:
    """The same array, filled."""
    array[:] = value
    return array


async def afill(value: float, array: Any) -> Any:
    return fill(value, array)


async def use_up_and_wait(log: str, gate: str, place: int, array: Any) -> bool:
    """As `use_up`; waits between that and its end."""
    is_right = use_up(place, array)
    say(log, is_right)
    await apass_gate(gate)
    return is_right


async def mark_and_wait(log: str, gate: str, array: Any) -> Any:
    """Write into its own, wait until all have, and say what is there then."""
    array[:] += os.getpid()
    say(log, "marked")
    await apass_gate(gate)
    return float(array[0]) - os.getpid(), zlib.crc32((array - os.getpid()).tobytes())


def keep_and_fail(times: int, array: Any) -> bool:
    """Keep the array, overwritten, and fail so many times; then whether it arrived right, and what was kept is as it was left."""
    is_right = use_up(0, array)
    kept.append(array)
    array[:] = len(kept)
    if len(kept) <= times:
        raise ValueError(f"attempt {len(kept)}")
    are_kept = all(np.all(one == number) for number, one in enumerate(kept, 1))
    kept.clear()
    return is_right and are_kept


async def akeep_and_fail(times: int, array: Any) -> bool:
    return keep_and_fail(times, array)


def raise_with(place: int) -> NoReturn:
    raise ValueError("with arrays", numbers(place), [numbers(place + 1)])


async def araise_with(place: int) -> NoReturn:
    raise_with(place)


# Keeping


def keep(place: int, array: Any) -> int:
    """Keep it for as long as the worker lives, or until `drop`."""
    kept.append((place, array))
    return len(kept)


async def akeep(place: int, array: Any) -> int:
    return keep(place, array)


def are_kept_right() -> bool:
    return all(is_numbers(place, array) for place, array in kept)


def drop() -> int:
    count = len(kept)
    kept.clear()
    gc.collect()
    return count


async def adrop() -> int:
    return drop()


def keep_in_cycle(array: Any) -> None:
    """Only a collection lets go of it."""
    cycle: list[Any] = [array]
    cycle.append(cycle)


def wait_with(log: str, gate: str, place: int, array: Any) -> bool:
    """Say that it has arrived, and whether it is right when the gate is open."""
    say(log, place)
    pass_gate(gate)
    return is_numbers(place, array)


async def await_with(log: str, gate: str, place: int, array: Any) -> bool:
    say(log, place)
    await apass_gate(gate)
    return is_numbers(place, array)


async def await_numbers(log: str, gate: str, place: int) -> Any:
    say(log, place)
    await apass_gate(gate)
    return numbers(place)


# Callables that carry an array


class Model:
    """Has a large array, and methods that use it."""

    def __init__(self, place: int) -> None:
        self.weights = numbers(place)

    def apply(self, value: float) -> float:
        return float(self.weights[0] + value)

    async def aapply(self, value: float) -> float:
        return self.apply(value)

    def change(self, value: float) -> float:
        """Writes into its own."""
        self.weights += value
        return float(self.weights[0])


def weighted(weights: Any, value: float) -> float:
    return float(weights[0] + value)


async def aweighted(weights: Any, value: float) -> float:
    return weighted(weights, value)
