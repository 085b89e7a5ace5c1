"""What the tests of large buffers run in workers, or in the program, to see where arrays lie and to die half way."""

import asyncio
import contextlib
import faulthandler
import mmap
import os
import resource
import signal
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from percore._common.system import room_left
from percore._transport import slots
from tests.contract.buffer_jobs import numbers

kept: list[Any] = []
made = 0


class Mapping(NamedTuple):
    """What the kernel says of the memory that an array lies in; sizes in bytes."""

    name: str
    permissions: str
    resident: int
    share: int
    """Of this process, where each page counts for all that have it."""
    private: int


def mapping_of(array: Any) -> Mapping | None:
    """The mapping of a file that the whole array lies in."""
    start = array.__array_interface__["data"][0]
    for header, sizes in _mappings():
        addresses, permissions, _, _, _, *name = header.split(maxsplit=5)
        low, high = (int(address, 16) for address in addresses.split("-"))
        if low <= start and start + array.nbytes <= high and name:
            private = sizes["Private_Clean"] + sizes["Private_Dirty"]
            return Mapping(name[0], permissions, sizes["Rss"], sizes["Pss"], private)
    return None


def memfds_mapped() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:" in line]


def _mappings() -> Iterator[tuple[str, dict[str, int]]]:
    header = ""
    sizes: dict[str, int] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if " " in name:
            if header:
                yield header, sizes
            header, sizes = line, {}
        elif rest.endswith(" kB"):
            sizes[name] = int(rest[:-3]) * 1024
    yield header, sizes


def mapping_when_read(array: Any) -> tuple[Any, float]:
    """Where it lies, when each of its pages has been looked at; and its sum."""
    total = float(array.sum())
    return mapping_of(array), total


def mapping_when_written(array: Any) -> tuple[Any, float]:
    """As `mapping_when_read`, when the first and the last number have been written."""
    array[0] = array[-1] = 0
    return mapping_when_read(array)


def mappings_of_arena() -> int:
    """Resident bytes of this process in memfds."""
    return sum(sizes["Rss"] for header, sizes in _mappings() if "/memfd:percore" in header)


def family_share(pids: Iterable[int]) -> int:
    """Bytes of memory of these processes, shared pages once."""
    total = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def crc(data: Any) -> int:
    return zlib.crc32(data)


async def echo_checked(expected: int, data: Any) -> Any:
    """The same, with its checksum as it arrived; some are kept for a while."""
    found = zlib.crc32(data)
    assert found == expected, "it has arrived wrong"
    if isinstance(data, np.ndarray):
        if len(kept) > 20:
            for one, checksum in kept:
                assert zlib.crc32(one) == checksum, "it has changed while it was kept"
            kept.clear()
        if expected % 7 == 0:
            kept.append((data, expected))
    return data


def drop() -> None:
    kept.clear()


def count_and_make(place: int, size: int) -> Any:
    """An array of so many numbers."""
    global made
    made += 1
    return numbers(place, size)


def how_many_made() -> int:
    return made


def marked(size: int) -> Any:
    """So many bytes, zero but for the ends and both sides of each gigabyte: what a truncated length would lose."""
    array = np.zeros(size, np.uint8)
    for place in _places(size):
        array[place] = place % 251 + 1
    return array


def is_marked(array: Any, size: int) -> bool:
    return len(array) == size and all(array[place] == place % 251 + 1 for place in _places(size))


def change_marks(array: Any, size: int) -> bool:
    """Whether it is `marked`; its own are overwritten then."""
    is_right = is_marked(array, size)
    array[0] = array[-1] = 0
    return is_right


def _places(size: int) -> set[int]:
    return {place for edge in range(0, size + 1, 1 << 30) for place in (edge - 1, edge) if 0 <= place < size} | {size - 1}


def lack_room(left: int | None) -> None:
    """From now on this process takes so many bytes for what is left; None: what there is."""
    setattr(slots, "room_left", room_left if left is None else lambda: left)  # noqa: B010  # it is none of its names to mypy


# Dying half way


class DiesWhenRead:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.kill, (_Self(), signal.SIGKILL)


class _Self:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.getpid, ()


def dies_when_read(size: int) -> list[Any]:
    """An array, one that could follow it, and between them what ends the process that reads this."""
    return [numbers(0, size), DiesWhenRead(), numbers(1, size)]


def dies_when_written(size: int) -> list[Any]:
    """Two arrays; copying the second ends the process half way, since its file has become shorter than its mapping."""
    faulthandler.disable()  # would print a report of what is meant
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryFile() as file:
        file.truncate(8 * size)
        mapped = mmap.mmap(file.fileno(), 8 * size)
        second = np.frombuffer(mapped, np.float64)
        file.truncate(4 * size)
    return [numbers(0, size), second]


async def adies_when_written(size: int) -> list[Any]:
    return dies_when_written(size)


async def wait_for_ever(_array: Any) -> None:
    await asyncio.get_running_loop().create_future()
