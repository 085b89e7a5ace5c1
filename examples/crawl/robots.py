"""The rules of a site: its robots.txt, read as RFC 9309 requires, with the standard library's parser. Runs in the parent."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from urllib.robotparser import RobotFileParser

from crawl.frontier import Visit
from crawl.manners import FAILURES, reason_of
from crawl.pages import AGENT, BadStatus, RobotsFile, host_of, is_passing

MAX_REDIRECTS = 5  # the least number that RFC 9309 recommends to follow


@dataclass(frozen=True, slots=True)
class Rules:
    """A site's rules for this crawler. Without `parser`, all URLs are allowed.

    `refusal`: why the rules could not be fetched; then no page may be fetched. `delay`: the seconds between two requests that
    the site asks for (Crawl-delay, which is not in the RFC, but which many sites use).
    """

    parser: RobotFileParser | None = field(default=None, repr=False)
    refusal: str = ""
    delay: float = 0.0

    @classmethod
    def of(cls, text: str) -> "Rules":
        parser = RobotFileParser()
        parser.parse(text.splitlines())
        return cls(parser, delay=float(parser.crawl_delay(AGENT) or 0))

    def allows(self, url: str) -> bool:
        try:
            return self.parser is None or self.parser.can_fetch(AGENT, url)
        except ValueError:  # "http://a%5B/": some versions unquote it and then cannot parse it; a session could not either
            return False


ALL_ALLOWED = Rules()


async def read_rules(fetch: Callable[[Visit], Awaitable[RobotsFile]], visit: Visit) -> Rules:
    """Fetch the robots.txt of a visit's site.

    As RFC 9309, 2.3.1 requires: redirects are followed, also to other hosts. A 4xx means that there are no rules. If the
    site or the network fails, everything is forbidden. A persistent 429 counts as such a failure, because it means "not now".
    """
    for _ in range(1 + MAX_REDIRECTS):
        try:
            file = await fetch(visit)
        except FAILURES as error:
            has_none = isinstance(error, BadStatus) and not is_passing(error.status)
            return ALL_ALLOWED if has_none else Rules(refusal=f"robots.txt: {reason_of(error)}")
        if file.location is None:
            return Rules.of(file.text)
        if not file.location:
            return ALL_ALLOWED
        visit = replace(visit, url=file.location, host=host_of(file.location))
    return ALL_ALLOWED
