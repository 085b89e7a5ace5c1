"""One page: fetched, parsed and measured. This is the part that runs in the workers, on every CPU."""

import errno
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit, urlunsplit

import aiohttp
from selectolax.lexbor import LexborHTMLParser

import percore

DEFAULT_PORTS = {"http": ":80", "https": ":443"}
# The first that fits is the kind of a failure; some of aiohttp's exceptions are several of these.
KINDS = {
    TimeoutError: "timeout",
    aiohttp.ClientConnectorDNSError: "unknown host",
    aiohttp.ClientSSLError: "TLS",
    aiohttp.ClientConnectorError: "cannot connect",
    aiohttp.ServerDisconnectedError: "disconnected",
}
REDIRECTS = frozenset({301, 302, 303, 307, 308})


@dataclass(frozen=True, slots=True)
class Page:
    """What the crawl keeps of one page. `error` is the kind of failure, "" if there was none."""

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


@asynccontextmanager
async def http(page_timeout: float) -> AsyncIterator[aiohttp.ClientSession]:
    """One session per process: its connections are shared by all the pages this process fetches."""
    connector = aiohttp.TCPConnector(limit=0)  # percore's `concurrency` is the limit
    timeout = aiohttp.ClientTimeout(total=page_timeout)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        yield session


async def fetch_page(url: str) -> Page:
    """What the parent calls on a worker. A page that cannot be had is a Page with an `error`, not an exception."""
    return await get_page(percore.state(aiohttp.ClientSession), url, percore.current_worker().index)


async def get_page(session: aiohttp.ClientSession, url: str, worker: int | None = None) -> Page:
    began = time.monotonic()
    try:
        # Redirects are links to the crawler: followed by the session, a page could be fetched twice.
        async with session.get(url, allow_redirects=False) as response:
            size = len(await response.read())
            html = await response.text(errors="replace") if response.content_type == "text/html" else ""
    except (aiohttp.ClientError, TimeoutError) as error:
        return Page(url, error=kind_of(error), seconds=time.monotonic() - began, worker=worker)
    title, words, links = parse(url, html)
    if response.status in REDIRECTS:
        target = absolute(url, response.headers.get("Location", ""))
        links = (target,) if target else ()
    return Page(
        url,
        status=response.status,
        size=size,
        title=title,
        words=words,
        links=links if response.ok else (),  # what an error page links to is not part of the site
        error="" if response.ok else f"HTTP {response.status}",
        seconds=time.monotonic() - began,
        worker=worker,
    )


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


def kind_of(error: Exception) -> str:
    """The kind under which the summary counts a failure."""
    for exception, kind in KINDS.items():
        if isinstance(error, exception):
            return kind
    reset = isinstance(error, OSError) and error.errno == errno.ECONNRESET
    return "connection reset" if reset else type(error).__name__
