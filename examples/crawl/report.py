"""The results of a crawl: the tally, the live display and the summary."""

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

import percore
from crawl.pages import Page

REFRESH_SECONDS = 0.25


@dataclass
class Tally:
    """The figures of one crawl."""

    name: str
    has_workers: bool = True
    limit: float | None = None
    """Seconds after which the crawl ends."""
    place: str = ""
    """Which of several crawls this is."""
    pages: int = 0
    redirects: int = 0
    size: int = 0
    words: int = 0
    failures: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    by_worker: Counter[int | None] = field(default_factory=Counter)
    disallowed: int = 0
    retried: int = 0
    ended_because: str = "interrupted"
    farm_cpu: float | None = None
    most_at_once: int | None = None
    _began: float | None = None
    _ended: float | None = None

    def begin(self) -> None:
        self._began = time.monotonic()

    def end(self, *, disallowed: int, retried: int) -> None:
        self._ended = time.monotonic()
        self.disallowed, self.retried = disallowed, retried

    def count(self, page: Page) -> None:
        if page.error:
            self.failures[page.error].append(page.url)
            return
        self.size += page.size
        self.by_worker[page.worker] += 1
        if page.is_redirect:
            self.redirects += 1
        else:
            self.pages += 1
            self.words += page.words

    @property
    def failed(self) -> int:
        return sum(map(len, self.failures.values()))

    @property
    def seconds(self) -> float:
        """How long the crawl took, or has taken so far, without the start of the workers."""
        return 0.0 if self._began is None else (self._ended or time.monotonic()) - self._began

    @property
    def pages_per_second(self) -> float:
        return self.pages / self.seconds if self.seconds else 0.0

    def share(self, worker: int | None) -> float:
        return self.by_worker[worker] / (self.by_worker.total() or 1)


# ---- while it runs ----


def live_table(tally: Tally, waiting: int, runner: percore.Runner | None) -> Group:
    """Return a table with a line for each worker and the figures of the whole crawl in the title."""
    which = f"{tally.name} ({tally.place})" if tally.place else tally.name
    limit = f" of at most {tally.limit:g}" if tally.limit else ""
    failed = f", {tally.failed} failed" if tally.failed else ""
    pages = f"{tally.pages} pages, {tally.pages_per_second:.0f} pages/s, {waiting} waiting{failed}"
    title = f"{which}, {tally.seconds:.0f}{limit} s: {pages}"
    table = Table("worker", "pid", "state", "under way", "visited", "share")
    shown = Group(Text(title, style="italic"), table)  # a title of the table would be wrapped at the table's width
    if runner is None:
        table.add_row("this process", "", "", "", str(tally.by_worker[None]), "100 %")
        return shown
    for worker in runner.statistics().workers:
        visited, share = tally.by_worker[worker.index], f"{tally.share(worker.index):.0%}"
        state = f"{worker.state}, restarted {worker.restarts} x" if worker.restarts else str(worker.state)
        table.add_row(str(worker.index), str(worker.pid), state, str(worker.running), str(visited), share)
    return shown


@contextlib.asynccontextmanager
async def live_display(console: Console, render: Callable[[], Group]) -> AsyncIterator[None]:
    """Show the result of `render` a few times a second, and once more at the end. Does nothing if there is no terminal."""
    if not console.is_terminal:
        yield
        return
    # Refresh from the loop, not by rich's thread: the crawl changes the tally and the frontier in the loop's thread.
    with Live(render(), console=console, auto_refresh=False) as live:

        async def refresh() -> None:
            while True:
                await asyncio.sleep(REFRESH_SECONDS)
                live.update(render(), refresh=True)

        refreshing = asyncio.create_task(refresh())
        try:
            yield
        finally:
            refreshing.cancel()
            live.update(render(), refresh=True)


# ---- at the end ----


def print_summary(console: Console, tallies: Sequence[Tally], cpus: int, *, listed: int | None = None) -> None:
    """Print the crawls side by side, then the failures of each: every URL, or at most `listed` for each reason."""
    table = Table("", *(tally.name for tally in tallies), title="Summary", title_justify="left")
    for name, figure in FIGURES.items():
        table.add_row(name, *(figure(tally) for tally in tallies))
    if all(tally.farm_cpu is not None for tally in tallies):
        table.add_row("the farm's own CPU share", *(farm_share(tally, cpus) for tally in tallies))
    if all(tally.most_at_once is not None for tally in tallies):
        table.add_row("most at once at a site", *(str(tally.most_at_once) for tally in tallies))
    console.print(table)
    for tally in tallies:
        print_failures(console, tally, listed)
    first, *others = tallies
    for other in others:
        if other.pages_per_second:
            ratio = first.pages_per_second / other.pages_per_second
            console.print(f"{first.name}: {ratio:.2f} times the pages/s of {other.name}, on {cpus} CPUs")


FIGURES: dict[str, Callable[[Tally], str]] = {
    "pages/s": lambda tally: f"{tally.pages_per_second:.0f}",
    "pages": lambda tally: str(tally.pages),
    "seconds": lambda tally: f"{tally.seconds:.1f} ({tally.ended_because})",
    "MB": lambda tally: f"{tally.size / 1e6:.1f}",
    "words": lambda tally: str(tally.words),
    "redirects": lambda tally: str(tally.redirects),
    "failed": lambda tally: str(tally.failed),
    "retried": lambda tally: str(tally.retried),
    "forbidden by robots.txt": lambda tally: str(tally.disallowed),
    "workers' shares": lambda tally: worker_shares(tally),
}


def worker_shares(tally: Tally) -> str:
    if not tally.has_workers:
        return "one process"
    workers = sorted(worker for worker in tally.by_worker if worker is not None)
    return ", ".join(f"{worker}: {tally.share(worker):.0%}" for worker in workers) or "no pages"


def farm_share(tally: Tally, cpus: int) -> str:
    if not tally.farm_cpu or not tally.seconds:
        return "0 %"
    return f"{tally.farm_cpu / (tally.seconds * cpus):.0%} of {cpus} CPUs ({tally.farm_cpu:.1f} s)"


def print_failures(console: Console, tally: Tally, listed: int | None) -> None:
    """Print the failed URLs as plain lines, so that they can be copied and searched."""
    for reason, urls in sorted(tally.failures.items()):
        console.print(f"{tally.name}, {reason}: {len(urls)} failed", markup=False, highlight=False, soft_wrap=True)
        for url in sorted(urls)[:listed]:
            console.print(f"    {url}", markup=False, highlight=False, soft_wrap=True)
        if listed is not None and len(urls) > listed:
            console.print("    ...")
