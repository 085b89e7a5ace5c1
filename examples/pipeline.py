"""A pipeline on every CPU: fetch pages, parse them, and write them to a file, with bounded memory for any number of pages.

    python examples/pipeline.py 5000 --output pages.jsonl                 # pages of a farm of sites on this machine
    python examples/pipeline.py --input urls.txt --output pages.jsonl     # the pages of a list of any length

The stages are a map over a map: `runner.map(parse, runner.map(fetch, urls))`. Each stage takes only as much from the previous stage
as the next one has room for. If parsing is slower than fetching, fetching waits; if writing the file is the slowest, both wait. The
stages share the workers: fetches run in their event loops, parsing in their threads. The lines are in the order of the input. At a
terminal, the program shows its progress. The exit status is 1 if every page failed.
"""

import argparse
import asyncio
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle, islice, product
from pathlib import Path
from types import TracebackType
from typing import Literal, TextIO

import aiohttp
from selectolax.lexbor import LexborHTMLParser

import percore
from farm import Farm, new_event_loop
from sites import MODULES, RELEASES

FARM_PAGES = 2000
FARM_MODULES = 24  # only a part of the farm, because it is rendered before the first page can be fetched
INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C
REFRESH_SECONDS = 0.5
CLEAR = "\r\x1b[K"  # moves the cursor to the beginning of the terminal's line, and clears the line


@dataclass(frozen=True, slots=True)
class Page:
    """The result of the first stage. `error` says why there is no page; "" if there is one."""

    url: str
    html: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """The output for one page."""

    url: str
    title: str = ""
    words: int = 0
    most_frequent: tuple[str, ...] = ()
    error: str = ""


@asynccontextmanager
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """One session per worker."""
    connector = aiohttp.TCPConnector(limit=0)  # the runner's `concurrency` is the limit
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=30)) as session:
        yield session


async def fetch(url: str) -> Page:
    """The first stage, which waits for the network. A failure is returned as a Page, since an exception would end the pipeline."""
    try:
        async with percore.state(aiohttp.ClientSession).get(url) as response:
            if not response.ok:
                return Page(url, error=f"HTTP {response.status}")
            return Page(url, await response.text(errors="replace"))
    except (aiohttp.ClientError, TimeoutError) as error:
        return Page(url, error=str(error) or type(error).__name__)


def parse(page: Page) -> Line:
    """The second stage, which needs the CPU."""
    if page.error:
        return Line(page.url, error=page.error)
    tree = LexborHTMLParser(page.html)
    title = tree.css_first("title")
    words = re.findall(r"\w+", tree.body.text(separator=" ").lower()) if tree.body else []
    frequent = Counter(word for word in words if len(word) > 3).most_common(3)
    return Line(page.url, title.text(strip=True) if title else "", len(words), tuple(word for word, _ in frequent))


async def run_pipeline(urls: Iterable[str], output: "Output", progress: "Progress", workers: int | None = None) -> None:
    """Write a line of JSON for each page."""
    # Both stages may be repeated safely. With retries, a worker that dies costs some time, but no line.
    async with percore.Runner(workers, lifespan=http, retries=2) as runner:
        async for line in runner.map(parse, runner.map(fetch, urls)):
            output.write(json.dumps(asdict(line), ensure_ascii=False) + "\n")
            progress.count(line)


# ---- where lines go ----


class CannotWrite(Exception):
    """The output cannot be written. The text is for the user."""


class Output:
    """A file, or standard output.

    Raises:
        CannotWrite: the output cannot be written, for example because the disk is full. Leaving the block may raise it too,
            because the last lines are written only then.
    """

    def __init__(self, path: Path | None) -> None:
        self._name = "standard output" if path is None else str(path)
        self._file = sys.stdout if path is None else open_file(path, "w")

    def write(self, line: str) -> None:
        with self._failing():
            self._file.write(line)

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        with self._failing():
            if self._file is sys.stdout:
                self._file.flush()
            else:
                self._file.close()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._file is sys.stdout:  # the interpreter flushes it once more when it ends, which would fail again
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise CannotWrite(f"cannot write {self._name}: {error.strerror}") from error


class Progress:
    """Counts lines, and shows the count on a line of the terminal."""

    def __init__(self, terminal: TextIO | None) -> None:
        """`terminal`: where to show the count. None: do not show it."""
        self.written = self.failed = 0
        self._terminal = terminal
        self._began = time.monotonic()
        self._next = 0.0
        self._show()

    def count(self, line: Line) -> None:
        self.written += 1
        self.failed += bool(line.error)
        self._show()

    def clear(self) -> None:
        """Clear the line of the terminal."""
        if self._terminal is not None:
            print(CLEAR, end="", file=self._terminal, flush=True)

    def summary(self) -> str:
        failed = f", {self.failed} of them failed" if self.failed else ""
        return f"{self.written} pages in {time.monotonic() - self._began:.1f} s{failed}"

    def _show(self) -> None:
        now = time.monotonic()
        if self._terminal is not None and now >= self._next:
            self._next = now + REFRESH_SECONDS
            print(f"{CLEAR}{self.summary()}", end=" ...", file=self._terminal, flush=True)


# ---- where pages come from ----


def urls_of_farm(starts: list[str]) -> Iterator[str]:
    """Yield the farm's pages, again and again. Sites alternate, so that no site gets all fetches at once."""
    for release, module, start in cycle(product(RELEASES, MODULES[:FARM_MODULES], starts)):
        yield f"{start}{release}/{module}.html"


def urls_of_file(file: Iterable[str]) -> Iterator[str]:
    """Yield the lines that are not empty and do not begin with #. Each line is read only when it is needed."""
    for line in file:
        url = line.strip()
        if url and not url.startswith("#"):
            yield url


# ---- the command line ----


def main() -> int:
    options = read_command_line()
    try:
        progress = process(options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except CannotWrite as error:
        sys.exit(str(error))
    print(progress.summary(), file=sys.stderr)
    return int(progress.failed == progress.written > 0)


def process(options: argparse.Namespace) -> Progress:
    """Run the pipeline from the input to the output. Ctrl-C raises KeyboardInterrupt; the output then has the finished lines."""
    watches = sys.stderr.isatty() and (options.output or not sys.stdout.isatty())  # no progress if the terminal shows the lines
    with ExitStack() as stack:
        output = stack.enter_context(Output(options.output))
        if options.input:
            urls = urls_of_file(stack.enter_context(open_file(options.input, "r")))
        else:
            urls = urls_of_farm(stack.enter_context(Farm(modules=FARM_MODULES)).starts)
        progress = Progress(sys.stderr if watches else None)
        stack.callback(progress.clear)
        with asyncio.Runner(loop_factory=new_event_loop) as loop:
            loop.run(run_pipeline(islice(urls, options.count), output, progress, options.workers))
    return progress


def open_file(path: Path, mode: Literal["r", "w"]) -> TextIO:
    try:
        return path.open(mode, encoding="utf-8")
    except OSError as error:
        sys.exit(f"cannot open {path}: {error.strerror}")


def read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fetches pages, parses them and writes their contents, on every CPU.")
    add = parser.add_argument
    add(
        "count",
        nargs="?",
        type=whole,
        metavar="COUNT",
        help=f"pages to fetch (default: all of --input, or {FARM_PAGES} of the farm)",
    )
    add("--input", type=Path, metavar="FILE", help="URLs, one a line (default: pages of a farm of sites on this machine)")
    add("--output", type=Path, metavar="FILE", help="write the lines to this file (default: standard output)")
    add("--workers", type=whole, metavar="N", help="processes (default: one for each CPU)")
    options = parser.parse_args()
    if options.count is None and options.input is None:
        options.count = FARM_PAGES
    return options


def whole(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


if __name__ == "__main__":
    sys.exit(main())
