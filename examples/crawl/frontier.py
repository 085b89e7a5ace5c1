"""The frontier (URLs still to visit) and the crawl loop. They run in the parent, since only it knows which URLs were seen."""

import asyncio
import contextlib
import heapq
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

from crawl.pages import Page, host_of


class SiteRules(Protocol):
    """The part of a site's robots.txt (crawl/robots.py) that the frontier needs."""

    @property
    def refusal(self) -> str: ...
    @property
    def delay(self) -> float: ...
    def allows(self, url: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Visit:
    """A URL to visit now. `is_robots`: it is the site's robots.txt. `refusal`: why it must not be fetched ("": it may)."""

    url: str
    host: str
    depth: int = 0
    is_robots: bool = False
    refusal: str = ""
    delay: float = 0.0


@dataclass(slots=True)
class Site:
    """The URLs of one host, in the order of discovery, and the host's rules (None: not known yet)."""

    host: str
    urls: deque[tuple[str, int]] = field(default_factory=deque)
    rules: SiteRules | None = None
    under_way: int = 0
    has_turn: bool = False
    is_resting: bool = False

    def is_ready(self, at_once: int) -> bool:
        if self.has_turn or self.is_resting:
            return False
        if self.rules is None:
            return self.under_way == 0  # no page of a site is fetched while its robots.txt is being fetched
        limit = 1 if self.rules.delay else at_once
        return bool(self.urls) and self.under_way < limit


class Frontier:
    """The URLs to visit. Each is handed out once, and none is more than `depth` links away from a start.

    Sites take turns, however many URLs each has. Most links of a page lead to its own site, so first come, first served would
    send all visits to one site after the other. No site has more than `at_once` visits in progress, so that a slow site does
    not occupy all of them. The first visit to a site is for its robots.txt; the site's other URLs are handed out only after
    `learn` was called with its rules. A site that asks for a delay has one visit at a time, with the delay between two.

    The frontier reads no clock and never waits: the time is an argument.
    """

    def __init__(
        self, starts: Iterable[str], *, depth: int, at_once: int, follow_hosts: bool = False, visited: Iterable[str] = ()
    ) -> None:
        starts = list(starts)
        self.disallowed = 0
        self._depth = depth
        self._at_once = at_once
        self._seen = set(visited)
        self._hosts = None if follow_hosts else {host_of(url) for url in starts}
        self._sites: dict[str, Site] = {}
        self._turns: deque[Site] = deque()
        self._resting: list[tuple[float, str]] = []  # a heap of hosts, by the time at which their delay is over
        self._under_way = 0
        self._waiting = 0
        for url in starts:
            self._add(url, 0)

    def __len__(self) -> int:
        """The number of URLs that wait."""
        return self._waiting

    @property
    def is_finished(self) -> bool:
        """Whether every URL found so far has been visited."""
        return not self._waiting and not self._under_way

    @property
    def next_time(self) -> float | None:
        """The time from which `next` may return a URL even if no visit ends before: the end of the first delay."""
        return self._resting[0][0] if self._resting else None

    def next(self, now: float) -> Visit | None:
        """Return the next URL to visit, or None if none can be visited now. Call `done` after each visit."""
        while self._resting and self._resting[0][0] <= now:
            site = self._sites[heapq.heappop(self._resting)[1]]
            site.is_resting = False
            self._give_turn(site)
        while self._turns:
            site = self._turns.popleft()
            site.has_turn = False
            visit = self._take(site)
            if visit is not None:
                site.under_way += 1
                self._under_way += 1
                self._give_turn(site)
                return visit
        return None

    def done(self, visit: Visit, now: float) -> None:
        site = self._sites[visit.host]
        site.under_way -= 1
        self._under_way -= 1
        if site.rules is not None and site.rules.delay:
            site.is_resting = True
            heapq.heappush(self._resting, (now + site.rules.delay, site.host))
        self._give_turn(site)

    def learn(self, visit: Visit, rules: SiteRules) -> None:
        """Set the site's rules, which the robots.txt of this visit contained."""
        self._sites[visit.host].rules = rules

    def follow(self, page: Page, depth: int) -> None:
        """Add the links of the page. If a start page has moved, its new host is crawled too."""
        if page.is_redirect and depth == 0 and self._hosts is not None:
            self._hosts.update(map(host_of, page.links))
        if depth < self._depth or (page.is_redirect and depth == 0):
            for url in page.links:
                self._add(url, depth + 1)

    def _add(self, url: str, depth: int) -> None:
        host = host_of(url)
        if url in self._seen or (self._hosts is not None and host not in self._hosts):
            return
        self._seen.add(url)
        self._waiting += 1
        site = self._sites.get(host)
        if site is None:
            site = self._sites[host] = Site(host)
        site.urls.append((url, depth))
        self._give_turn(site)

    def _give_turn(self, site: Site) -> None:
        if site.is_ready(self._at_once):
            site.has_turn = True
            self._turns.append(site)

    def _take(self, site: Site) -> Visit | None:
        """Return the site's next visit: robots.txt first, then the next URL that the rules allow. None if there is none."""
        if site.rules is None:
            scheme = urlsplit(site.urls[0][0]).scheme
            return Visit(f"{scheme}://{site.host}/robots.txt", site.host, is_robots=True)
        while site.urls:
            url, depth = site.urls.popleft()
            self._waiting -= 1
            if site.rules.allows(url):
                return Visit(url, site.host, depth, refusal=site.rules.refusal, delay=site.rules.delay)
            self.disallowed += 1
        return None


async def crawl(frontier: Frontier, visit: Callable[[Visit], Awaitable[None]], *, at_once: int) -> None:
    """Visit every URL in the frontier and the URLs that those lead to, with at most `at_once` visits in progress.

    Returns when no URL is left. Cancellation cancels the visits in progress. An exception of `visit` ends the crawl, and is
    raised in an ExceptionGroup.
    """
    loop = asyncio.get_running_loop()
    has_ended = asyncio.Event()
    under_way = 0

    async def make(one: Visit) -> None:
        nonlocal under_way
        await visit(one)
        frontier.done(one, loop.time())
        under_way -= 1
        has_ended.set()

    async with asyncio.TaskGroup() as group:
        while True:
            has_ended.clear()
            while under_way < at_once and (one := frontier.next(loop.time())):
                under_way += 1
                group.create_task(make(one))
            if frontier.is_finished:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(frontier.next_time):
                    await has_ended.wait()
