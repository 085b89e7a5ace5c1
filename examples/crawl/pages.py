"""Fetch, parse and measure one page. This code runs in the workers, on every CPU."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from urllib.parse import urljoin, urlsplit, urlunsplit

import aiohttp
from selectolax.lexbor import LexborHTMLParser

import percore

AGENT = "percore-scrape"  # the crawler's name for robots.txt
DEFAULT_PORTS = {"http": ":80", "https": ":443"}
REDIRECTS = frozenset({301, 302, 303, 307, 308})
TOO_MANY_REQUESTS = 429
ROBOTS_BYTES = 512 * 1024  # the most bytes of a robots.txt to read; RFC 9309 requires at least 500 KiB


@dataclass(frozen=True, slots=True)
class Page:
    """The crawl's data of one page. `error` says why it could not be fetched; "" if it could."""

    url: str
    status: int = 0
    size: int = 0
    title: str = ""
    words: int = 0
    links: tuple[str, ...] = ()
    error: str = ""
    seconds: float = 0.0
    worker: int | None = None

    @property
    def is_redirect(self) -> bool:
        return self.status in REDIRECTS


@dataclass(frozen=True, slots=True)
class RobotsFile:
    """The text of a robots.txt, or the URL that it has moved to ("": not a URL on the web)."""

    text: str = ""
    location: str | None = None


class BadStatus(Exception):
    """A site answered with an error status, such as 404 or 503.

    A worker raises it, and the parent decides by its status whether to retry, so it must be picklable: its arguments are its
    attributes. `retry_after`: for how many seconds the site wants no request (0: it does not say).
    """

    def __init__(self, status: int, retry_after: float = 0.0) -> None:
        super().__init__(status, retry_after)
        self.status = status
        self.retry_after = retry_after

    def __str__(self) -> str:
        return f"HTTP {self.status}"


def is_passing(status: int) -> bool:
    """Whether an error status is temporary, and does not mean that the page does not exist."""
    return status >= 500 or status == TOO_MANY_REQUESTS


def seconds_of(retry_after: str, now: datetime) -> float:
    """Return the seconds that a Retry-After asks for: it has a number of seconds, or a date (RFC 9110, 10.2.3). 0: neither."""
    text = retry_after.strip()
    if text.isascii() and text.isdecimal():
        return float(text)
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return 0.0
    return max(0.0, (when.replace(tzinfo=when.tzinfo or UTC) - now).total_seconds())


@asynccontextmanager
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """One session per process. All pages that the process fetches share its connections."""
    # No limit of connections, because percore's `concurrency` and `per_key` limit them, and no timeout, because percore's
    # `timeout` limits each attempt. No cookies: a page's content must not depend on which worker visited the site before.
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    cookies = aiohttp.DummyCookieJar()
    headers = {"User-Agent": AGENT}
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=cookies, headers=headers) as session:
        yield session


async def fetch_page(url: str) -> Page:
    """Fetch a page in a worker. Raises BadStatus, aiohttp.ClientError or OSError if it cannot be fetched."""
    return await get_page(percore.state(aiohttp.ClientSession), url, percore.current_worker().index)


async def fetch_robots(url: str) -> RobotsFile:
    """Fetch a robots.txt in a worker, before any page of its site. Raises as fetch_page."""
    return await get_robots(percore.state(aiohttp.ClientSession), url)


async def get_page(session: aiohttp.ClientSession, url: str, worker: int | None = None) -> Page:
    began = time.monotonic()
    # The crawler treats redirects as links. If the session followed them, a page could be fetched twice, and another host
    # could be visited against the crawler's rules.
    async with session.get(url, allow_redirects=False) as response:
        if response.status >= 400:
            raise BadStatus(response.status, seconds_of(response.headers.get("Retry-After", ""), datetime.now(UTC)))
        size = len(await response.read())
        html = await response.text(errors="replace") if response.content_type == "text/html" else ""
    title, words, links = parse(url, html)
    if response.status in REDIRECTS:
        target = absolute(url, response.headers.get("Location", ""))
        links = (target,) if target else ()
    return Page(url, response.status, size, title, words, links, seconds=time.monotonic() - began, worker=worker)


async def get_robots(session: aiohttp.ClientSession, url: str) -> RobotsFile:
    async with session.get(url, allow_redirects=False) as response:
        if response.status >= 400:
            raise BadStatus(response.status, seconds_of(response.headers.get("Retry-After", ""), datetime.now(UTC)))
        if response.status in REDIRECTS:
            return RobotsFile(location=absolute(url, response.headers.get("Location", "")) or "")
        text = b""
        async for part in response.content.iter_any():
            text += part
            if len(text) >= ROBOTS_BYTES:
                break
    return RobotsFile(text[:ROBOTS_BYTES].decode("utf-8-sig", errors="replace"))


def parse(url: str, html: str) -> tuple[str, int, tuple[str, ...]]:
    """Return the title, the number of words in the text, and the linked pages, without duplicates."""
    tree = LexborHTMLParser(html)
    title = tree.css_first("title")
    hrefs = dict.fromkeys((anchor.attributes["href"] or "").partition("#")[0] for anchor in tree.css("a[href]"))
    links = dict.fromkeys(link for href in hrefs if href and (link := absolute(url, href)))
    words = len(tree.body.text(separator=" ").split()) if tree.body else 0
    return (title.text(strip=True) if title else ""), words, tuple(links)


def absolute(base: str, href: str) -> str | None:
    """Return the normalized URL by which the crawl identifies a page, or None if it is not an http or https URL."""
    try:
        parts = urlsplit(urljoin(base, href.strip()))
    except ValueError:  # such as "http://[": links in pages can be malformed
        return None
    if parts.scheme not in DEFAULT_PORTS or not parts.netloc:
        return None
    host = parts.netloc.lower().removesuffix(DEFAULT_PORTS[parts.scheme])
    return urlunsplit((parts.scheme, host, parts.path or "/", parts.query, ""))


def host_of(url: str) -> str:
    """Return the host of a page, with its port. Politeness counts by it, for http and https together."""
    return urlsplit(url).netloc
