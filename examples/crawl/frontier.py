"""What is still to be crawled, and the crawl itself. Runs in the parent, which alone knows what was seen."""

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
    """What the frontier has to know of a site's robots.txt (crawl/robots.py)."""

    @property
    def refusal(self) -> str: ...
    @property
    def delay(self) -> float: ...
    def allows(self, url: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Visit:
    """One URL's turn. `is_robots`: it is the site's robots.txt. `refusal`: it is not to be fetched, for that reason."""

    url: str
    host: str
    depth: int = 0
    is_robots: bool = False
    refusal: str = ""
    delay: float = 0.0


@dataclass(slots=True)
class Site:
    """One host's URLs in the order of their discovery, and how far its rules are known."""

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
            return self.under_way == 0  # nothing of a site is fetched beside its robots.txt
        limit = 1 if self.rules.delay else at_once
        return bool(self.urls) and self.under_way < limit


class Frontier:
    """The URLs to visit, each handed out once, none deeper than `depth` links from a start.

    Sites take turns, however many URLs each has: a page is full of links to its own site, and first come, first served
    would send everybody to one site after the other. No site has more than `at_once` visits under way, so that a slow one
    does not gather all of them. The first visit to a site is for its robots.txt; nothing else is handed out until `learn`
    was told what that says. A site that asks for a delay has one visit at a time, and the delay between two.

    Knows no clock and waits for nothing: the time is an argument.
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
        """How many URLs wait."""
        return self._waiting

    @property
    def is_finished(self) -> bool:
        """Whether every URL that was found has been visited."""
        return not self._waiting and not self._under_way

    @property
    def next_time(self) -> float | None:
        """When `next` may have a URL even if nothing happens until then: the end of the first delay."""
        return self._resting[0][0] if self._resting else None

    def next(self, now: float) -> Visit | None:
        """The URL whose turn it is, None if none can be visited now. Every one is answered by a call of `done`."""
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
        """What the robots.txt that this visit was for has said."""
        self._sites[visit.host].rules = rules

    def follow(self, page: Page, depth: int) -> None:
        """Adds what the page links to. A start page that has moved takes its host along."""
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
        """The site's next URL that its rules allow; None if it has none."""
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
    """Visits everything in the frontier and what it leads to, with up to `at_once` visits under way at any moment.

    Ends when nothing is left. Cancelled, it gives up the visits under way. What `visit` raises ends it, in a group.
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
