"""The responses of the farm's sites (farm.py) at each path: the standard library's documentation, and pages that cause trouble."""

import importlib
import pydoc
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

HOSTS = tuple(f"127.0.0.{number}" for number in range(1, 65))

# The same text in several releases, as on documentation sites. This gives enough pages for a crawl of some seconds.
RELEASES = ("3.12", "3.13", "3.14", "3.15")

# Modules that every Python since 3.11 has and that are quick to render. os and sys are left out: pydoc shows the values
# of a module's variables, and the environment and the paths of this machine do not belong on a web page.
MODULES = tuple(
    """
    abc argparse base64 bdb bisect calendar cmd code codecs collections configparser contextlib contextvars copy csv
    dataclasses datetime difflib enum fileinput fractions ftplib functools getopt graphlib gzip hashlib heapq hmac
    html.parser http.client io ipaddress itertools json logging mimetypes mmap netrc operator optparse pathlib pdb
    pickle pkgutil plistlib poplib pprint queue random re sched secrets selectors shelve shlex shutil smtplib socket
    statistics string struct subprocess tarfile tempfile textwrap threading timeit tokenize tomllib traceback types
    typing unittest.case urllib.parse uuid warnings wave zlib
    """.split()  # noqa: SIM905 - easier to read than seventy strings
)

ROBOTS = "/robots.txt"
MOVED_ROBOTS = "/about/robots.txt"
PRIVATE = "/private/"


@dataclass(frozen=True, slots=True)
class Answer:
    """The response of a site at one path. Before it, the site fails `times` times with the status `first`.

    With `retry_after`, such a failure asks for a pause of so many seconds; `by_date`: with the time of day at which it ends.
    """

    status: int = 200
    body: bytes = b""
    location: str | None = None
    delay: float = 0.0
    reset: bool = False
    first: int = 503
    times: int = 0
    retry_after: int = 0
    by_date: bool = False


Site = dict[str, Answer]


def render_pages(modules: Iterable[str]) -> dict[str, bytes]:
    """Render the documentation of these modules as HTML."""
    renderer = pydoc.HTMLDoc()
    known = frozenset(modules)
    pages = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pydoc reads every attribute, including deprecated ones
        for name in modules:
            module = importlib.import_module(name)
            pages[name] = relink(renderer.page(name, renderer.document(module)), known).encode()
    return pages


def relink(html: str, known: frozenset[str]) -> str:
    """Point links to modules that the farm does not have to docs.python.org, and remove links to files of this machine."""

    def target(link: re.Match[str]) -> str:
        return link[0] if link[1] in known else f'href="https://docs.python.org/3/library/{link[1]}.html"'

    html = re.sub(r'<a href="file:[^"]*">[^<]*</a>', "", html)
    return re.sub(r'href="([\w.]+)\.html(?:#[^"]*)?"', target, html)


def index_page(title: str, links: list[str]) -> bytes:
    items = "\n".join(f'<li><a href="{link}">{link}</a></li>' for link in links)
    return f"<!DOCTYPE html><html><head><title>{title}</title></head><body><ul>\n{items}\n</ul></body></html>".encode()


def build_sites(roots: list[str], pages: dict[str, bytes], releases: Sequence[str], slow: float) -> list[Site]:
    """Build a site for each root, such as "http://127.0.0.1:8000/". A slow page takes `slow` seconds."""
    return [build_site(number, roots, pages, releases, slow) for number in range(len(roots))]


def build_site(number: int, roots: list[str], pages: dict[str, bytes], releases: Sequence[str], slow: float) -> Site:
    """Build every path of one site. Pages of modules that this site does not keep redirect to a neighbour's."""
    neighbours = [roots[(number + step) % len(roots)] for step in (1, 9)]
    kept = [name for place, name in enumerate(pages) if (number + place) % 16]
    site = {**robots_pages(number), **odd_pages(number, releases[-1], slow)}
    for release in releases:
        site[f"/{release}/"] = Answer(body=index_page(f"Python {release}", [f"{name}.html" for name in pages]))
        for name, body in pages.items():
            path = f"/{release}/{name}.html"
            site[path] = Answer(body=body) if name in kept else Answer(302, location=neighbours[0] + path[1:])
    links = [path for path in site if path.count("/") == 1 and path != ROBOTS]
    if number == 0:
        links.append(f"/{releases[-1]}/everything.html")
        site[links[-1]] = Answer(body=b"\n".join(pages.values()))
    links += ["/missing.html", f"{PRIVATE}diary.html", *(f"/{release}/" for release in releases), *neighbours]
    site["/"] = Answer(body=index_page(f"Site {number + 1}", links))
    return site


def robots_pages(number: int) -> Site:
    """Build a site's robots.txt and the pages that it forbids. Some sites have none, redirect it, or fail the first time."""
    rules = Answer(body=f"# Site {number + 1}\nUser-agent: *\nDisallow: {PRIVATE}\n".encode())
    site = {f"{PRIVATE}diary.html": Answer(body=index_page("A diary", [f"{PRIVATE}secret.html"]))}
    site[f"{PRIVATE}secret.html"] = Answer(body=index_page("A secret", []))
    match number % 8:
        case 5:
            site[ROBOTS] = Answer(body=rules.body, times=1)
        case 6:
            pass
        case 7:
            site[ROBOTS] = Answer(301, location=MOVED_ROBOTS)
            site[MOVED_ROBOTS] = rules
        case _:
            site[ROBOTS] = rules
    return site


def odd_pages(number: int, release: str, slow: float) -> Site:
    """Build the pages at the top of a site that cause trouble for crawlers."""
    odd = {
        "/error.html": Answer(500, body=index_page("Something went wrong", [])),
        "/moved.html": Answer(301, location=f"/{release}/"),
    }
    match number % 4:
        case 0:
            odd["/slow.html"] = Answer(body=index_page("At last", []), delay=slow)
        case 1:
            odd["/flaky.html"] = Answer(body=index_page("The second time", []), times=1)
        case 2:
            odd["/flakier.html"] = Answer(body=index_page("The third time", []), times=2)
        case 3:
            busy = index_page("Not so fast", [])
            odd["/busy.html"] = Answer(body=busy, first=429, times=1, retry_after=2, by_date=number % 8 == 7)
    if number % 8 == 0:
        odd["/reset.html"] = Answer(reset=True)
    return odd


def crawlable(site: Site) -> dict[str, int]:
    """List the paths that a crawler which obeys robots.txt finds on a site, each with its final status (0: no status)."""
    statuses = {path: 0 if answer.reset else answer.status for path, answer in site.items()}
    statuses["/missing.html"] = 404
    return {path: status for path, status in statuses.items() if not is_apart(site, path)}


def is_apart(site: Site, path: str) -> bool:
    """Whether a path is robots.txt itself, or forbidden by it."""
    return path in (ROBOTS, MOVED_ROBOTS) or (path.startswith(PRIVATE) and ROBOTS in site)
