"""An image pipeline on every CPU: decode photographs, shrink them, grade them by a table of all colours, and measure them.

    python examples/images.py                                # makes 48 photographs; develops them with percore, then alone
    python examples/images.py 200 --size 2400x1800 --output sheet.jpg

The table maps each of the 16.7 million colours to another one. It takes 48 MiB: too much to send along with every photograph, and
too much to copy to every worker. `runner.share(table)` puts it into shared memory once, and each worker reads it there. The small
pictures come back as numpy arrays, which are views of the memory that the worker wrote them to.
"""

import argparse
import asyncio
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import uvloop
from PIL import Image

import percore

PHOTOGRAPHS = 48
SIZE = (1600, 1200)
SMALL = (320, 240)
WEIGHTS = np.array([0.299, 0.587, 0.114], np.float32)  # of red, green and blue in the perceived brightness
BANDS = 8  # of brightness
BAR = 40  # characters of the longest bar
INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C

Pixels = npt.NDArray[np.uint8]
Size = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Picture:
    """A processed photograph: the small picture, and how many of its pixels are in each band of brightness."""

    name: str
    small: Pixels
    bands: npt.NDArray[np.int64]


# ---- what runs in the workers, and in the one process ----


def develop(path: Path, table: Pixels) -> Picture:
    with Image.open(path) as photograph:
        small = np.asarray(photograph.convert("RGB").resize(SMALL, Image.Resampling.LANCZOS))
    red, green, blue = small[..., 0], small[..., 1], small[..., 2]
    graded = table[red, green, blue]
    bands, _ = np.histogram(graded @ WEIGHTS, BANDS, (0, 256))
    return Picture(path.name, graded, bands)


def develop_shared(path: Path, table: percore.Shared[Pixels]) -> Picture:
    """As `develop`, for a worker. The first call in each worker maps the shared table; later calls reuse it."""
    return develop(path, table.value)


def make_photograph(path: Path, number: int, size: Size) -> None:
    """Make a photograph of coarse and fine hills of colour. The same number always gives the same photograph."""
    chance = np.random.default_rng(number)

    def hills(rows: int) -> Image.Image:
        pixels = chance.integers(0, 256, (rows, 4 * rows // 3, 3), np.uint8)
        return Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)

    Image.blend(hills(6), hills(240), 0.2).save(path, quality=90)


# ---- the table, and the sheet ----


def colour_table() -> Pixels:
    """Make the table: `table[red, green, blue]` is the new colour, which is more vivid and has more contrast."""
    level = np.linspace(0, 1, 256, dtype=np.float32)
    table = np.empty((256, 256, 256, 3), np.uint8)
    for red in range(256):
        colours = np.stack(np.broadcast_arrays(level[red], level[:, None], level[None, :]), axis=-1)
        grey = (colours @ WEIGHTS)[..., None]
        vivid = np.clip(grey + 1.3 * (colours - grey), 0, 1)
        table[red] = 255 * vivid**2 * (3 - 2 * vivid)
    return table


class Sheet:
    """A contact sheet: the small pictures side by side, and the sums of their bands."""

    def __init__(self, pictures: int) -> None:
        self._columns = math.ceil(math.sqrt(pictures))
        width, height = SMALL
        self._pixels = np.zeros((math.ceil(pictures / self._columns) * height, self._columns * width, 3), np.uint8)
        self.bands = np.zeros(BANDS, np.int64)
        self.count = 0

    def add(self, picture: Picture) -> None:
        row, column = divmod(self.count, self._columns)
        width, height = SMALL
        self._pixels[row * height : (row + 1) * height, column * width : (column + 1) * width] = picture.small
        self.bands += picture.bands
        self.count += 1

    def is_same(self, other: "Sheet") -> bool:
        return np.array_equal(self._pixels, other._pixels)

    def save(self, path: Path) -> None:
        Image.fromarray(self._pixels).save(path)


# ---- with percore, and without ----


async def develop_all(paths: list[Path], size: Size, table: Pixels, workers: int | None) -> tuple[Sheet, float, int]:
    """Return the sheet, the seconds it took, and the number of workers."""
    sheet = Sheet(len(paths))
    # All calls may be repeated safely. With retries, a worker that dies costs some time, but no picture.
    async with percore.Runner(workers, retries=2) as runner:
        print(f"making {len(paths)} photographs of {size[0]} x {size[1]}", flush=True)
        await runner.map(make_photograph, paths, range(len(paths)), repeat(size))
        with timed() as seconds:
            shared = await runner.share(table)
            async for picture in runner.map(develop_shared, paths, repeat(shared)):
                sheet.add(picture)
        return sheet, seconds[0], len(runner.statistics().workers)


def develop_alone(paths: list[Path], table: Pixels) -> tuple[Sheet, float]:
    sheet = Sheet(len(paths))
    with timed() as seconds:
        for path in paths:
            sheet.add(develop(path, table))
    return sheet, seconds[0]


def compare(folder: Path, options: argparse.Namespace) -> int:
    paths = [folder / f"{number:04}.jpg" for number in range(options.count)]
    table = colour_table()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        sheet, parallel, workers = loop.run(develop_all(paths, options.size, table, options.workers))
    if options.output:
        save(sheet, options.output)
    alone, single = develop_alone(paths, table)
    report(sheet, parallel, single)
    print(f"percore: {single / parallel:.2f} times the pictures/s of one process, with {workers} workers")
    if not sheet.is_same(alone):
        sys.exit("the pictures of the two are not the same")
    return 0


def save(sheet: Sheet, path: Path) -> None:
    try:
        sheet.save(path)
    except (OSError, ValueError) as error:  # ValueError: Pillow does not know the file name's extension
        sys.exit(f"cannot save {path}: {error}")


@contextmanager
def timed() -> Iterator[list[float]]:
    """Measure the block. After it, the list contains the seconds that it took."""
    seconds: list[float] = []
    start = time.perf_counter()
    yield seconds
    seconds.append(time.perf_counter() - start)


def report(sheet: Sheet, parallel: float, single: float) -> None:
    print("\nbrightness")
    for band, share in bars(sheet.bands):
        print(f"  {band:<12} {share}".rstrip())
    print(f"\n  {'':<12} {'percore':>10} {'one process':>12}")
    print(f"  {'pictures':<12} {sheet.count:>10} {sheet.count:>12}")
    print(f"  {'seconds':<12} {parallel:>10.2f} {single:>12.2f}")
    print(f"  {'pictures/s':<12} {sheet.count / parallel:>10.1f} {sheet.count / single:>12.1f}\n")


def bars(bands: npt.NDArray[np.int64]) -> Iterator[tuple[str, str]]:
    step = 256 // BANDS
    for number, share in enumerate(bands / bands.sum()):
        yield f"{number * step} to {(number + 1) * step - 1}", f"{share:6.1%} {'#' * round(BAR * share * BANDS / 2)}"


# ---- the command line ----


def main() -> int:
    options = read_command_line()
    try:
        with TemporaryDirectory(prefix="photographs-") as folder:
            return compare(Path(folder), options)
    except KeyboardInterrupt:
        return INTERRUPTED


def read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Develops photographs on every CPU, and then in one process.")
    add = parser.add_argument
    add("count", nargs="?", type=whole, default=PHOTOGRAPHS, metavar="COUNT", help=f"photographs to show (default {PHOTOGRAPHS})")
    add("--size", type=size, default=SIZE, metavar="WxH", help=f"pixels of each (default: {SIZE[0]}x{SIZE[1]})")
    add("--workers", type=whole, metavar="N", help="processes (default: one for each CPU)")
    add("--output", type=Path, metavar="FILE", help="save the contact sheet there (.jpg, .png)")
    return parser.parse_args()


def whole(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def size(text: str) -> Size:
    width, height = text.split("x")
    return whole(width), whole(height)


if __name__ == "__main__":
    sys.exit(main())
