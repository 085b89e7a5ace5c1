"""A crawler on every CPU: one aiohttp session per process, pages fetched and parsed where they arrive.

    python examples/scrape.py                                  # crawls a farm of 64 sites on this machine, and compares
    python examples/scrape.py https://example.com --depth 2    # crawls a real site
    python examples/scrape.py --input urls.txt --output pages.jsonl

The workers fetch and parse (crawl/pages.py); this process decides what to visit next (crawl/frontier.py). `--single`
does all of it in one plain asyncio process, without percore. Ctrl-C ends a crawl and keeps what it has.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TextIO

from rich.console import Console

import percore
from crawl.frontier import Frontier, crawl
from crawl.pages import Page, absolute, fetch_page, get_page, http
from crawl.report import Tally, live_display, live_table, print_summary
from farm import Farm, new_event_loop

DEMO_SECONDS = 8.0
INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C


class Scraper:
    """This program: what it was asked for, where its output goes, and the tally of each crawl it has made."""

    def __init__(self, options: argparse.Namespace, console: Console, output: TextIO | None) -> None:
        self.options = options
        self.console = console
        self.output = output
        self.tallies: list[Tally] = []

    def crawl(self, starts: list[str], *, single: bool) -> Tally:
        """One crawl, from its start pages to its end. KeyboardInterrupt by Ctrl-C; the tally then has what was done."""
        tally = Tally("one process" if single else "percore")
        self.tallies.append(tally)
        # The loop that percore's workers have, so that the two kinds of crawl differ in nothing but percore.
        with asyncio.Runner(loop_factory=new_event_loop) as loop:
            loop.run(self.in_one_process(starts, tally) if single else self.on_every_cpu(starts, tally))
        return tally

    def crawl_farm(self) -> None:
        """The demonstration: percore crawls the farm, then one plain process does."""
        self.console.print("Starting a farm of 64 sites on this machine ...")
        with Farm() as farm:
            for single in [True] if self.options.single else [False, True]:
                before = farm.usage()
                try:
                    self.crawl(farm.starts, single=single)
                finally:
                    self.tallies[-1].farm_cpu = farm.usage().since(before).cpu

    async def on_every_cpu(self, starts: list[str], tally: Tally) -> None:
        """The crawl on percore's workers."""
        lifespan = partial(http, self.options.timeout)
        concurrency = self.options.concurrency
        async with percore.Runner(self.options.workers, lifespan=lifespan, concurrency=concurrency) as runner:

            async def fetch(url: str) -> Page:
                try:
                    return await runner.run(fetch_page, url)
                except percore.WorkerDied as death:  # it cost the pages it had begun; the crawl goes on
                    return Page(url, error=type(death).__name__)

            workers = len(runner.statistics().workers)
            await self._visit_all(starts, tally, fetch, at_once=workers * concurrency, runner=runner)

    async def in_one_process(self, starts: list[str], tally: Tally) -> None:
        """The same crawl in this process alone, for comparison."""
        async with http(self.options.timeout) as session:
            await self._visit_all(starts, tally, partial(get_page, session), at_once=self.options.concurrency)

    async def _visit_all(
        self,
        starts: list[str],
        tally: Tally,
        fetch: Callable[[str], Awaitable[Page]],
        *,
        at_once: int,
        runner: percore.Runner | None = None,
    ) -> None:
        def keep(page: Page) -> None:
            tally.count(page)
            self._write(page)

        frontier = Frontier(starts, depth=self.options.depth, follow_hosts=self.options.follow_hosts)
        tally.begin()
        try:
            async with live_display(self.console, lambda: live_table(tally, len(frontier), runner)):
                async with asyncio.timeout(self.options.seconds):
                    await crawl(frontier, fetch, keep, at_once=at_once)
            tally.ended_because = "all visited"
        except TimeoutError:
            tally.ended_because = "time is up"
        finally:
            tally.end()

    def _write(self, page: Page) -> None:
        if self.output is not None:
            # Flushed page by page: whatever ends this program, the file has every page that was visited.
            json.dump({field.name: getattr(page, field.name) for field in fields(page)}, self.output)
            self.output.write("\n")
            self.output.flush()


def main() -> int:
    options, starts = read_command_line()
    console = Console()
    with open_output(options.output) as output:
        scraper = Scraper(options, console, output)
        try:
            if starts:
                scraper.crawl(starts, single=options.single)
            else:
                scraper.crawl_farm()
            code = 0
        except KeyboardInterrupt:
            code = INTERRUPTED
    if scraper.tallies:
        print_summary(console, scraper.tallies, len(os.sched_getaffinity(0)))
    return code


def open_output(path: Path | None) -> AbstractContextManager[TextIO | None]:
    if path is None:
        return nullcontext()
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        sys.exit(f"cannot write {path}: {error.strerror}")


# ---- the command line ----


def read_command_line() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description="Crawls web sites with asyncio on every CPU.")
    add = parser.add_argument
    add("urls", nargs="*", metavar="URL", help="where to start; nowhere: a farm of 64 sites on this machine")
    add("--input", type=Path, metavar="FILE", help="more URLs to start from, one a line")
    add("--output", type=Path, metavar="FILE", help="write each page as a line of JSON, as it comes")
    add("--workers", type=whole, metavar="N", help="processes (default: one for each CPU)")
    add("--concurrency", type=whole, default=100, metavar="N", help="pages at once in each process (default 100)")
    add("--depth", type=int, default=3, metavar="N", help="how many links away from a start to go (default 3)")
    add("--seconds", type=positive, metavar="S", help="end after so long (default: when all is visited)")
    add("--timeout", type=positive, default=10.0, metavar="S", help="seconds one page may take (default 10)")
    add("--follow-hosts", action="store_true", help="follow links to other hosts than those of the start pages")
    add("--single", action="store_true", help="one plain asyncio process, without percore")
    options = parser.parse_args()
    starts = []
    for given in options.urls + read_urls(parser, options.input):
        start = absolute("", given)
        if start is None:
            parser.error(f"not a URL that begins with http:// or https://: {given}")
        starts.append(start)
    if not starts:
        options.seconds = options.seconds or DEMO_SECONDS
    return options, starts


def read_urls(parser: argparse.ArgumentParser, path: Path | None) -> list[str]:
    """The lines of a file of URLs; empty ones and those that begin with # do not count."""
    if path is None:
        return []
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        parser.error(f"cannot read {path}: {error.strerror}")
    urls = [line for line in lines if line and not line.startswith("#")]
    if not urls:
        parser.error(f"no URLs in {path}")
    return urls


def whole(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError
    return number


if __name__ == "__main__":
    sys.exit(main())
