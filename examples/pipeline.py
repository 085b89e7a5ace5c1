"""A pipeline on every CPU: pages are fetched, parsed, and written to a file, in the same memory whatever the length.

    python examples/pipeline.py 5000 --output pages.jsonl                 # pages of a farm of sites on this machine
    python examples/pipeline.py --input urls.txt --output pages.jsonl     # the pages of a list of any length

The stages are a map over a map: `runner.map(parse, runner.map(fetch, urls))`. Each takes from the one before it what the one after
it has room for. Where parsing is slower than fetching, fetching waits; where the file is the slowest, both wait. They share the
workers: fetches run in their event loops, parsing in their threads. The lines have the order of the input.
"""

import argparse
import asyncio
import json
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import cycle, islice, product
from pathlib import Path
from typing import Literal, TextIO

import aiohttp
from selectolax.lexbor import LexborHTMLParser

import percore
from farm import Farm, new_event_loop
from sites import MODULES, RELEASES

FARM_PAGES = 2000
FARM_MODULES = 24  # a part of the farm: it has to be rendered before the first page can be fetched
INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C


@dataclass(frozen=True, slots=True)
class Page:
    """What the first stage hands to the second. `error` says why there is no page, "" if there is one."""

    url: str
    html: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """What is written of a page."""

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
    """The first stage: it waits for the network. What fails is a Page too; an exception would end the pipeline."""
    try:
        async with percore.state(aiohttp.ClientSession).get(url) as response:
            if not response.ok:
                return Page(url, error=f"HTTP {response.status}")
            return Page(url, await response.text(errors="replace"))
    except (aiohttp.ClientError, TimeoutError) as error:
        return Page(url, error=str(error) or type(error).__name__)


def parse(page: Page) -> Line:
    """The second stage: it takes a CPU."""
    if page.error:
        return Line(page.url, error=page.error)
    tree = LexborHTMLParser(page.html)
    title = tree.css_first("title")
    words = re.findall(r"\w+", tree.body.text(separator=" ").lower()) if tree.body else []
    frequent = Counter(word for word in words if len(word) > 3).most_common(3)
    return Line(page.url, title.text(strip=True) if title else "", len(words), tuple(word for word, _ in frequent))


async def run_pipeline(urls: Iterable[str], output: TextIO, workers: int | None = None) -> int:
    """Writes a line of JSON for each page. Returns how many."""
    written = 0
    # Both stages may be repeated without harm: so a worker that dies costs some time and no line.
    async with percore.Runner(workers, lifespan=http, retries=2) as runner:
        async for line in runner.map(parse, runner.map(fetch, urls)):
            output.write(json.dumps(asdict(line), ensure_ascii=False) + "\n")
            written += 1
    return written


# ---- where pages come from ----


def urls_of_farm(starts: list[str]) -> Iterator[str]:
    """The farm's pages over and over again, site after site, so that no site has all the fetches at once."""
    for release, module, start in cycle(product(RELEASES, MODULES[:FARM_MODULES], starts)):
        yield f"{start}{release}/{module}.html"


def urls_of_file(file: Iterable[str]) -> Iterator[str]:
    """The lines that are not empty and do not begin with #, each read when it is wanted."""
    for line in file:
        url = line.strip()
        if url and not url.startswith("#"):
            yield url


# ---- the command line ----


def main() -> int:
    options = read_command_line()
    with ExitStack() as stack:
        output = stack.enter_context(open_file(options.output, "w")) if options.output else sys.stdout
        if options.input:
            urls = urls_of_file(stack.enter_context(open_file(options.input, "r")))
        else:
            urls = urls_of_farm(stack.enter_context(Farm(modules=FARM_MODULES)).starts)
        began = time.monotonic()
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as loop:
                written = loop.run(run_pipeline(islice(urls, options.count), output, options.workers))
        except KeyboardInterrupt:
            return INTERRUPTED
    print(f"{written} pages in {time.monotonic() - began:.1f} s", file=sys.stderr)
    return 0


def open_file(path: Path, mode: Literal["r", "w"]) -> TextIO:
    try:
        return path.open(mode, encoding="utf-8")
    except OSError as error:
        sys.exit(f"cannot open {path}: {error.strerror}")


def read_command_line() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fetches pages, parses them and writes what is in them, on every CPU.")
    add = parser.add_argument
    add(
        "count",
        nargs="?",
        type=whole,
        metavar="COUNT",
        help=f"so many pages (default: all of --input, or {FARM_PAGES} of the farm)",
    )
    add("--input", type=Path, metavar="FILE", help="URLs, one a line (default: pages of a farm of sites on this machine)")
    add("--output", type=Path, metavar="FILE", help="where the lines go (default: standard output)")
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
