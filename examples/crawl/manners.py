"""The crawler's politeness: how many requests a host gets at once and in a second, which are retried, and when. Runs in the parent.

`EveryCpu` uses percore's options for it. `OneProcess` does the same with plain asyncio, so that the comparison is fair.
"""

import asyncio
import errno
import itertools
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import aiohttp

import percore
from crawl.frontier import Visit
from crawl.pages import BadStatus, Page, RobotsFile, fetch_page, fetch_robots, get_page, get_robots, is_passing

T = TypeVar("T")

LONGEST_PAUSE = 60.0
LONGEST_REST = 120.0  # the most seconds of a Retry-After that the crawler obeys
CUT_OFF = frozenset({errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE, errno.ETIMEDOUT})

# All exceptions that a bad page can cause. Any other exception is a bug in this program.
FAILURES = (BadStatus, aiohttp.ClientError, OSError, ValueError, percore.WorkerDied, percore.RemoteError)

# The first match counts, because some of aiohttp's exceptions are instances of several of these.
REASONS = {
    BadStatus: "",
    TimeoutError: "timeout",
    percore.WorkerDied: "worker died",
    aiohttp.ClientConnectorDNSError: "unknown host",
    aiohttp.ClientSSLError: "TLS",
    aiohttp.ServerDisconnectedError: "disconnected",
    aiohttp.ClientPayloadError: "broken off",
}


def may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed a little later. percore calls this before it retries a call (`retry_on`)."""
    if isinstance(error, BadStatus):
        return is_passing(error.status)
    passing = (TimeoutError, percore.WorkerDied, aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError)
    return isinstance(error, passing) or (isinstance(error, OSError) and error.errno in CUT_OFF)


def reason_of(error: BaseException) -> str:
    """Return the reason under which the summary counts a failure."""
    for exception, reason in REASONS.items():
        if isinstance(error, exception):
            return reason or str(error)
    if isinstance(error, OSError) and error.errno == errno.ECONNRESET:
        return "connection reset"
    return "cannot connect" if isinstance(error, aiohttp.ClientConnectorError) else type(error).__name__


@dataclass(frozen=True, slots=True)
class Manners:
    """The limits: `per_host` requests to one host at once, `timeout` seconds for each, and up to `retries` retries.

    The first retry follows about `backoff` seconds after the failure. The pause doubles with each further retry. A host gets at
    most `rate` requests a second (None: as many as it answers), and fewer if its robots.txt asks for a longer delay between two.
    """

    per_host: int
    timeout: float
    retries: int
    backoff: float
    rate: float | None = None

    def pause(self, failed: int) -> float:
        """Return the seconds to wait after `failed` attempts. Randomized, so that retries do not all happen at the same time."""
        usual = min(self.backoff * 2.0 ** min(failed - 1, 30), LONGEST_PAUSE)
        return usual * random.uniform(0.5, 1.5)

    def gap(self, delay: float) -> float:
        """Return the seconds between two requests to a host whose robots.txt asks for this delay. 0: there need be none."""
        return max(delay, 1 / self.rate if self.rate else 0.0)


def rest_of(error: BaseException) -> float:
    """Return for how many seconds the site that has answered with this error wants no request."""
    return min(error.retry_after, LONGEST_REST) if isinstance(error, BadStatus) else 0.0


class EveryCpu:
    """Fetches in percore's workers. The runner must have `per_key=manners.per_host`."""

    def __init__(self, runner: percore.Runner, manners: Manners) -> None:
        self._runner = runner
        self._manners = manners

    async def page(self, visit: Visit) -> Page:
        return await self._politely(visit, fetch_page)

    async def robots(self, visit: Visit) -> RobotsFile:
        return await self._politely(visit, fetch_robots)

    async def _politely(self, visit: Visit, fetch: Callable[[str], Awaitable[T]]) -> T:
        # The key keeps a host in one worker, which has connections to it, and `per_key` limits the calls of each key. A
        # call that waits for its next attempt or for its rate takes no place, neither of its host nor of its worker.
        gap = self._manners.gap(visit.delay)
        polite = self._runner.options(
            key=visit.host,
            rate=percore.Rate(1, per=gap) if gap else None,
            timeout=self._manners.timeout,
            retries=self._manners.retries,
            retry_on=partial(self._may_pass, visit.host),
            backoff=self._manners.pause,
        )
        try:
            return await polite.run(fetch, visit.url)
        except BadStatus as error:
            self._rest(visit.host, error)
            raise

    def _may_pass(self, host: str, error: BaseException) -> bool:
        self._rest(host, error)
        return may_pass(error)

    def _rest(self, host: str, error: BaseException) -> None:
        """Send no request to the host for as long as it asks for. Then its rate is what it was."""
        if seconds := rest_of(error):
            with suppress(percore.RunnerClosed):
                self._runner.set_rate(host, None, after=seconds)

    @property
    def retried(self) -> int:
        return self._runner.statistics().retried


class Pace:
    """When the next request to a host may begin."""

    def __init__(self) -> None:
        self._free_at = 0.0

    async def turn(self, gap: float) -> None:
        """Wait until a request may begin. The next one begins `gap` seconds later."""
        loop = asyncio.get_running_loop()
        while (wait := self._free_at - loop.time()) > 0:  # noqa: ASYNC110  # no event: a time, that another request may have taken
            await asyncio.sleep(wait)
        self._free_at = loop.time() + gap

    def rest(self, seconds: float) -> None:
        """Let no request begin for so many seconds."""
        self._free_at = max(self._free_at, asyncio.get_running_loop().time() + seconds)


class OneProcess:
    """Fetches in this process, `concurrency` pages at once. It does by hand what percore does for `EveryCpu`."""

    def __init__(self, session: aiohttp.ClientSession, manners: Manners, concurrency: int) -> None:
        self._session = session
        self._manners = manners
        self._places = asyncio.Semaphore(concurrency)
        self._hosts = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(manners.per_host))
        self._paces = defaultdict[str, Pace](Pace)
        self.retried = 0

    async def page(self, visit: Visit) -> Page:
        return await self._politely(visit, get_page)

    async def robots(self, visit: Visit) -> RobotsFile:
        return await self._politely(visit, get_robots)

    async def _politely(self, visit: Visit, get: Callable[[aiohttp.ClientSession, str], Awaitable[T]]) -> T:
        pace = self._paces[visit.host]
        for failed in itertools.count(1):
            try:
                async with self._hosts[visit.host]:
                    await pace.turn(self._manners.gap(visit.delay))
                    async with self._places, asyncio.timeout(self._manners.timeout):
                        return await get(self._session, visit.url)
            except FAILURES as error:
                pace.rest(rest_of(error))
                if failed > self._manners.retries or not may_pass(error):
                    raise
            self.retried += 1
            await asyncio.sleep(self._manners.pause(failed))
        raise AssertionError("counts for ever")
