"""What is still to be crawled, and the crawl itself. Runs in the parent, which alone knows what was seen."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from urllib.parse import urlsplit

from crawl.pages import Page


class Frontier:
    """The URLs to visit, each handed out once, none deeper than `depth` links from a start.

    Sites take turns: a page is full of links to its own site, and first come, first served would send all workers to
    one site after the other. Within a site the order is that of discovery.
    """

    def __init__(self, starts: Iterable[str], *, depth: int, follow_hosts: bool = False) -> None:
        self._queue: asyncio.PriorityQueue[tuple[int, int, str]] = asyncio.PriorityQueue()  # turn, depth, URL
        self._turns: Counter[str] = Counter()
        self._seen: set[str] = set()
        self._depth = depth
        self._hosts = None if follow_hosts else {urlsplit(url).netloc for url in starts}
        for url in starts:
            self._add(url, 0)

    def __len__(self) -> int:
        return self._queue.qsize()

    async def next(self) -> tuple[str, int]:
        """The next URL and its depth; waits for one. Every one is answered by a call of `done`."""
        _, depth, url = await self._queue.get()
        return url, depth

    def done(self) -> None:
        self._queue.task_done()

    async def wait_finished(self) -> None:
        """Until every URL that was found has been visited."""
        await self._queue.join()

    def follow(self, page: Page, depth: int) -> None:
        """Adds what the page links to. A start page that has moved takes its host along."""
        if page.is_redirect and depth == 0 and self._hosts is not None:
            self._hosts.update(urlsplit(url).netloc for url in page.links)
        if depth < self._depth or (page.is_redirect and depth == 0):
            for url in page.links:
                self._add(url, depth + 1)

    def _add(self, url: str, depth: int) -> None:
        if url in self._seen:
            return
        self._seen.add(url)
        host = urlsplit(url).netloc
        if self._hosts is None or host in self._hosts:
            self._turns[host] += 1
            self._queue.put_nowait((self._turns[host], depth, url))


async def crawl(frontier: Frontier, fetch: Callable[[str], Awaitable[Page]], keep: Callable[[Page], None], *, at_once: int) -> None:
    """Visits everything in the frontier and what it leads to, with `at_once` pages under way at any moment.

    Ends when nothing is left. Cancelled, it gives up the pages under way; every page kept until then was kept whole.
    """

    async def visit() -> None:
        while True:
            url, depth = await frontier.next()
            page = await fetch(url)
            frontier.follow(page, depth)
            keep(page)
            frontier.done()

    async with asyncio.TaskGroup() as group:
        visitors = [group.create_task(visit()) for _ in range(at_once)]
        await frontier.wait_finished()
        for visitor in visitors:
            visitor.cancel()
