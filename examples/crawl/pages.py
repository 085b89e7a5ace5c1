"""One page: fetched, parsed and measured. This is the part that runs in the workers, on every CPU."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit, urlunsplit

import aiohttp
from selectolax.lexbor import LexborHTMLParser

import percore

AGENT = "percore-scrape"  # the name that robots.txt may call this crawler by
DEFAULT_PORTS = {"http": ":80", "https": ":443"}
REDIRECTS = frozenset({301, 302, 303, 307, 308})
TOO_MANY_REQUESTS = 429
ROBOTS_BYTES = 512 * 1024  # of a robots.txt are read: RFC 9309 asks for 500 KiB at least


@dataclass(frozen=True, slots=True)
class Page:
    """What the crawl keeps of one page. `error` is the reason why it could not be had, "" if it could."""

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
    """The text of a robots.txt, or where it has moved to ("" for nowhere on the web)."""

    text: str = ""
    location: str | None = None


class BadStatus(Exception):
    """A site answered that there is no page: 404, 503 and the like.

    Raised in a worker and looked at in the parent, by the function that decides about retries: it pickles by its status.
    """

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status

    def __str__(self) -> str:
        return f"HTTP {self.status}"


def is_passing(status: int) -> bool:
    """Whether an error status is about this moment, not about the page."""
    return status >= 500 or status == TOO_MANY_REQUESTS


@asynccontextmanager
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """One session per process: its connections are shared by all the pages this process fetches."""
    # No limit of its own: how many connections there are is decided by percore's `concurrency` and `per_key`. No time
    # limit either, for the same reason. No cookies: what a page says must not depend on which worker was there before.
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    cookies = aiohttp.DummyCookieJar()
    headers = {"User-Agent": AGENT}
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=cookies, headers=headers) as session:
        yield session


async def fetch_page(url: str) -> Page:
    """What the parent calls on a worker. BadStatus, aiohttp.ClientError, OSError: the page cannot be had."""
    return await get_page(percore.state(aiohttp.ClientSession), url, percore.current_worker().index)


async def fetch_robots(url: str) -> RobotsFile:
    """What the parent calls on a worker before anything else of a site. Raises as fetch_page."""
    return await get_robots(percore.state(aiohttp.ClientSession), url)


async def get_page(session: aiohttp.ClientSession, url: str, worker: int | None = None) -> Page:
    began = time.monotonic()
    # Redirects are links to the crawler: followed by the session, a page could be fetched twice, and another host unasked.
    async with session.get(url, allow_redirects=False) as response:
        if response.status >= 400:
            raise BadStatus(response.status)
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
            raise BadStatus(response.status)
        if response.status in REDIRECTS:
            return RobotsFile(location=absolute(url, response.headers.get("Location", "")) or "")
        text = b""
        async for part in response.content.iter_any():
            text += part
            if len(text) >= ROBOTS_BYTES:
                break
    return RobotsFile(text[:ROBOTS_BYTES].decode("utf-8-sig", errors="replace"))


def parse(url: str, html: str) -> tuple[str, int, tuple[str, ...]]:
    """The title, the number of words in the text, and all the pages linked to, each once."""
    tree = LexborHTMLParser(html)
    title = tree.css_first("title")
    hrefs = dict.fromkeys((anchor.attributes["href"] or "").partition("#")[0] for anchor in tree.css("a[href]"))
    links = dict.fromkeys(link for href in hrefs if href and (link := absolute(url, href)))
    words = len(tree.body.text(separator=" ").split()) if tree.body else 0
    return (title.text(strip=True) if title else ""), words, tuple(links)


def absolute(base: str, href: str) -> str | None:
    """The one form of a URL under which the crawl knows a page, None for what is not a page on the web."""
    try:
        parts = urlsplit(urljoin(base, href.strip()))
    except ValueError:  # such as "http://[": pages contain everything
        return None
    if parts.scheme not in DEFAULT_PORTS or not parts.netloc:
        return None
    host = parts.netloc.lower().removesuffix(DEFAULT_PORTS[parts.scheme])
    return urlunsplit((parts.scheme, host, parts.path or "/", parts.query, ""))


def host_of(url: str) -> str:
    """Whom a page is asked of: the address and port that politeness goes by, http and https alike."""
    return urlsplit(url).netloc
