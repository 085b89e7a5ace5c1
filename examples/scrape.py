"""A polite crawler on every CPU: each process has one aiohttp session, and parses the pages that it fetches.

    python examples/scrape.py                                  # crawls a farm of 64 sites on this machine, with and without percore
    python examples/scrape.py https://example.com --depth 2    # crawls a real site
    python examples/scrape.py --input urls.txt --output pages.jsonl --resume

The crawler sends at most `--per-host` requests to a host at once and `--rate` in a second, from all processes together, and none
that the host's robots.txt forbids. It keeps a Crawl-delay, and obeys Retry-After. Hosts take turns. Temporary failures are retried,
with growing pauses. The workers fetch and parse (crawl/pages.py); this process decides which page to visit next
(crawl/frontier.py) and how to treat hosts (crawl/manners.py, crawl/robots.py). `--single` crawls in one plain asyncio process,
without percore; `--compare` crawls both ways. Ctrl-C ends a crawl and keeps its results; the same command with `--resume`
continues it. The exit status is 1 if every page failed.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from rich.console import Console

import percore
from crawl.frontier import Frontier, Visit, crawl
from crawl.manners import FAILURES, EveryCpu, Manners, OneProcess, reason_of
from crawl.pages import BadStatus, Page, absolute, http
from crawl.record import BadRecord, Record
from crawl.report import Tally, live_display, live_table, print_summary
from crawl.robots import read_rules
from farm import Farm, new_event_loop

DEMO_SECONDS = 8.0
DEMO_LISTED = 3  # URLs to list for each kind of failure: the farm's failures are known
INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C

# How many of a host's pages to submit for each one that may be fetched at once. The next page is then ready when one
# ends, and a page that waits for its next attempt does not delay the others. The same factor applies to all pages in
# progress and the workers' places.
AHEAD = 2


class Scraper:
    """The program: its options, its output, and the tally of each crawl that it has made."""

    def __init__(self, options: argparse.Namespace, console: Console, record: Record | None) -> None:
        self.options = options
        self.console = console
        self.record = record
        self.manners = Manners(options.per_host, options.timeout, options.retries, options.backoff, options.rate)
        self.tallies: list[Tally] = []
        self._wanted = 1

    @property
    def has_failed(self) -> bool:
        """Whether a crawl failed on every page, and the record has no page either, from now or from the crawl that is resumed."""
        had = self.record is not None and any(not page.error for page, _ in self.record.pages())
        return not had and any(tally.failed and not tally.pages for tally in self.tallies)

    def crawl_all(self, starts: list[str]) -> None:
        """Run the crawls that the options ask for, one after the other."""
        kinds = [True] if self.options.single else [False, True] if self.options.compare else [False]
        self._wanted = len(kinds)
        for single in kinds:
            self.crawl(starts, single=single)

    def crawl_farm(self) -> None:
        """Run the demonstration: crawl the farm with percore, then in one plain process."""
        self.console.print("Starting a farm of 64 sites on this machine ...")
        with Farm() as farm:
            kinds = [True] if self.options.single else [False, True]
            self._wanted = len(kinds)
            for single in kinds:
                farm.forget()
                try:
                    self.crawl(farm.starts, single=single)
                finally:
                    usage = farm.usage()
                    self.tallies[-1].farm_cpu, self.tallies[-1].most_at_once = usage.cpu, usage.most_at_once

    def crawl(self, starts: list[str], *, single: bool) -> Tally:
        """Run one crawl. Ctrl-C raises KeyboardInterrupt; the tally then has the results up to that point."""
        tally = Tally("one process" if single else "percore", has_workers=not single, limit=self.options.seconds)
        self.tallies.append(tally)
        if self._wanted > 1:
            tally.place = f"crawl {len(self.tallies)} of {self._wanted}"
        # Use the same kind of loop as percore's workers, so that the two kinds of crawl differ only in percore.
        with asyncio.Runner(loop_factory=new_event_loop) as loop:
            loop.run(self.in_one_process(starts, tally) if single else self.on_every_cpu(starts, tally))
        return tally

    async def on_every_cpu(self, starts: list[str], tally: Tally) -> None:
        """Crawl with percore's workers."""
        concurrency, per_host = self.options.concurrency, self.options.per_host
        async with percore.Runner(self.options.workers, lifespan=http, concurrency=concurrency, per_key=per_host) as runner:
            places = concurrency * len(runner.statistics().workers)
            await self._visit_all(starts, tally, EveryCpu(runner, self.manners), places=places, runner=runner)

    async def in_one_process(self, starts: list[str], tally: Tally) -> None:
        """Crawl in this process alone, for comparison."""
        concurrency = self.options.concurrency
        async with http() as session:
            await self._visit_all(starts, tally, OneProcess(session, self.manners, concurrency), places=concurrency)

    async def _visit_all(
        self,
        starts: list[str],
        tally: Tally,
        fetcher: EveryCpu | OneProcess,
        *,
        places: int,
        runner: percore.Runner | None = None,
    ) -> None:
        frontier = self._make_frontier(starts)

        async def visit(one: Visit) -> None:
            if one.is_robots:
                frontier.learn(one, await read_rules(fetcher.robots, one))
                return
            page = await fetch(fetcher, one)
            frontier.follow(page, one.depth)
            tally.count(page)
            if self.record is not None and len(self.tallies) == 1:  # the second of two crawls serves only the comparison
                self.record.write(page, one.depth)

        tally.begin()
        try:
            async with live_display(self.console, lambda: live_table(tally, len(frontier), runner)):
                async with asyncio.timeout(self.options.seconds):
                    await crawl(frontier, visit, at_once=places * AHEAD)
            tally.ended_because = "all visited"
        except TimeoutError:
            tally.ended_because = "time is up"
        finally:
            tally.end(disallowed=frontier.disallowed, retried=fetcher.retried)

    def _make_frontier(self, starts: list[str]) -> Frontier:
        """Make the frontier from the start pages and from the pages of an earlier crawl in the record."""
        options = self.options
        pages = self.record.pages if self.record is not None else tuple
        visited = (page.url for page, _ in pages())
        at_once = options.per_host * AHEAD
        frontier = Frontier(starts, depth=options.depth, at_once=at_once, follow_hosts=options.follow_hosts, visited=visited)
        for page, depth in pages():
            frontier.follow(page, depth)
        return frontier


async def fetch(fetcher: EveryCpu | OneProcess, visit: Visit) -> Page:
    """Fetch a page. A failure is returned as a Page with the reason in `error`, so that the crawl continues."""
    if visit.refusal:
        return Page(visit.url, error=visit.refusal)
    try:
        return await fetcher.page(visit)
    except FAILURES as error:
        return Page(visit.url, status=error.status if isinstance(error, BadStatus) else 0, error=reason_of(error))


def main() -> int:
    options, starts = read_command_line()
    console = Console()
    try:
        with open_record(options) as record:
            scraper = Scraper(options, console, record)
            with summary_of(scraper):
                if starts:
                    scraper.crawl_all(starts)
                else:
                    scraper.crawl_farm()
    except (BadRecord, ExceptionGroup) as error:
        sys.exit(str(bad_record_of(error)))
    except KeyboardInterrupt:
        return INTERRUPTED
    return int(scraper.has_failed)


def bad_record_of(error: Exception) -> BadRecord:
    """Return the BadRecord in `error`, even if several visits raised one at once in a group. Any other error is raised again."""
    while isinstance(error, ExceptionGroup) and (found := error.subgroup(BadRecord)):
        error = found.exceptions[0]
    if not isinstance(error, BadRecord):
        raise error
    return error


@contextmanager
def summary_of(scraper: Scraper) -> Iterator[None]:
    """Print a summary at the end of the block, even if the block raises."""
    try:
        yield
    finally:
        if scraper.tallies:
            listed = None if scraper.options.urls else DEMO_LISTED
            print_summary(scraper.console, scraper.tallies, len(os.sched_getaffinity(0)), listed=listed)


def open_record(options: argparse.Namespace) -> AbstractContextManager[Record | None]:
    return nullcontext() if options.output is None else Record(options.output, resume=options.resume)


# ---- the command line ----


def read_command_line(words: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description="Crawls web sites politely, with asyncio on every CPU.")
    add = parser.add_argument
    add("urls", nargs="*", metavar="URL", help="the start pages (default: a farm of 64 sites on this machine)")
    add("--input", type=Path, metavar="FILE", help="more URLs to start from, one a line")
    add("--output", type=Path, metavar="FILE", help="write each page as a line of JSON, as soon as it is fetched")
    add("--resume", action="store_true", help=RESUME)
    add("--per-host", type=whole, default=2, metavar="N", help="requests of one host at once (default 2)")
    add("--rate", type=positive, metavar="N", help=RATE)
    add("--retries", type=natural, default=3, metavar="N", help=RETRIES)
    add("--backoff", type=positive, default=0.5, metavar="S", help="seconds before the second attempt (default 0.5)")
    add("--timeout", type=positive, default=10.0, metavar="S", help="seconds one attempt may take (default 10)")
    add("--workers", type=whole, metavar="N", help="processes (default: one for each CPU)")
    add("--concurrency", type=whole, default=100, metavar="N", help="pages at once in each process (default 100)")
    add("--depth", type=natural, default=3, metavar="N", help="how many links away from a start to go (default 3)")
    add("--seconds", type=positive, metavar="S", help="end after this time (default: when all pages are visited)")
    add("--follow-hosts", action="store_true", help="follow links to other hosts than those of the start pages")
    add("--single", action="store_true", help="one plain asyncio process, without percore")
    add("--compare", action="store_true", help="crawl twice, with percore and in one process; --output has the first")
    options = parser.parse_args(words)
    options.urls = starts = read_starts(parser, options)
    check_together(parser, options)
    if not starts:
        options.seconds = options.seconds or DEMO_SECONDS
    return options, starts


RATE = """requests to one host in a second, such as 5 or 0.1 (default: no limit but a Crawl-delay in its robots.txt)"""
RESUME = """continue the crawl in --output: its pages are not fetched again, and their links are followed; pages that failed are
fetched again, unless the site said that there is no such page (4xx)"""
RETRIES = """further attempts, each after twice the pause, if a page fails with 5xx or 429, a reset, a time-out or the death of its
worker (default 3)"""


def check_together(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.resume and options.output is None:
        parser.error("--resume continues the crawl in --output: give its file")
    if options.resume and not options.urls:
        parser.error("--resume needs the URLs of the crawl that it continues: the farm has other ones each time")
    if options.single and options.compare:
        parser.error("--single is one half of --compare: choose one of them")
    if options.resume and options.compare:
        parser.error("--compare needs two whole crawls: it cannot --resume one")


def read_starts(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[str]:
    starts = []
    for given in options.urls + read_urls(parser, options.input):
        start = absolute("", given)
        if start is None:
            parser.error(f"not a URL that begins with http:// or https://: {given}")
        starts.append(start)
    return starts


def read_urls(parser: argparse.ArgumentParser, path: Path | None) -> list[str]:
    """Read the URLs in a file, one a line. Empty lines and lines that begin with # are skipped."""
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


def natural(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError
    return number


def positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError
    return number


if __name__ == "__main__":
    sys.exit(main())
