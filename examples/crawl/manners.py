"""The crawler's politeness: how many requests a host gets at once, which are retried, and when. Runs in the parent.

`EveryCpu` uses percore's options for it. `OneProcess` does the same with plain asyncio, so that the comparison is fair.
"""

import asyncio
import errno
import itertools
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import aiohttp

import percore
from crawl.frontier import Visit
from crawl.pages import BadStatus, Page, RobotsFile, fetch_page, fetch_robots, get_page, get_robots, is_passing

T = TypeVar("T")

LONGEST_PAUSE = 60.0
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

    The first retry follows about `backoff` seconds after the failure. The pause doubles with each further retry.
    """

    per_host: int
    timeout: float
    retries: int
    backoff: float

    def pause(self, at_least: float, failed: int) -> float:
        """Return the seconds to wait after `failed` attempts. Randomized, so that retries do not all happen at the same time."""
        usual = min(self.backoff * 2.0 ** min(failed - 1, 30), LONGEST_PAUSE)
        return max(at_least, usual * random.uniform(0.5, 1.5))


class EveryCpu:
    """Fetches in percore's workers. The runner must have `per_key=manners.per_host`."""

    def __init__(self, runner: percore.Runner, manners: Manners) -> None:
        self._runner = runner
        self._manners = manners

    async def page(self, visit: Visit) -> Page:
        return await self._politely(visit).run(fetch_page, visit.url)

    async def robots(self, visit: Visit) -> RobotsFile:
        return await self._politely(visit).run(fetch_robots, visit.url)

    def _politely(self, visit: Visit) -> percore.Options:
        # The key keeps a host in one worker, which has connections to it, and `per_key` limits the calls of each key. A
        # call that waits for its next attempt takes no place, neither of its host nor of its worker.
        return self._runner.options(
            key=visit.host,
            timeout=self._manners.timeout,
            retries=self._manners.retries,
            retry_on=may_pass,
            backoff=partial(self._manners.pause, visit.delay),
        )

    @property
    def retried(self) -> int:
        return self._runner.statistics().retried


class OneProcess:
    """Fetches in this process, `concurrency` pages at once. It does by hand what percore does for `EveryCpu`."""

    def __init__(self, session: aiohttp.ClientSession, manners: Manners, concurrency: int) -> None:
        self._session = session
        self._manners = manners
        self._places = asyncio.Semaphore(concurrency)
        self._hosts = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(manners.per_host))
        self.retried = 0

    async def page(self, visit: Visit) -> Page:
        return await self._politely(visit, get_page)

    async def robots(self, visit: Visit) -> RobotsFile:
        return await self._politely(visit, get_robots)

    async def _politely(self, visit: Visit, get: Callable[[aiohttp.ClientSession, str], Awaitable[T]]) -> T:
        for failed in itertools.count(1):
            try:
                async with self._hosts[visit.host], self._places, asyncio.timeout(self._manners.timeout):
                    return await get(self._session, visit.url)
            except FAILURES as error:
                if failed > self._manners.retries or not may_pass(error):
                    raise
            self.retried += 1
            await asyncio.sleep(self._manners.pause(visit.delay, failed))
        raise AssertionError("counts for ever")
