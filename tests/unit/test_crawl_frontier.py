"""The example crawler's frontier: whose turn it is, and when nobody's. No process, no network."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from random import Random
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import crawling  # noqa: F401  # makes the examples importable

from crawl.frontier import Frontier, Visit, crawl  # isort: skip
from crawl.pages import Page  # isort: skip
from crawl.robots import ALL_ALLOWED, Rules  # isort: skip


def url(host: str, path: object = "") -> str:
    return f"http://{host}/{path}"


def urls(host: str, count: int) -> list[str]:
    return [url(host, number) for number in range(count)]


def take(frontier: Frontier, now: float = 0.0, rules: Rules = ALL_ALLOWED) -> list[Visit]:
    """Every page that can be visited now, in the order of the turns; sites that ask for their robots.txt get `rules`."""
    visits = []
    while visit := frontier.next(now):
        if visit.is_robots:
            frontier.learn(visit, rules)
            frontier.done(visit, now)
        else:
            visits.append(visit)
    return visits


def places(visits: Iterable[Visit]) -> list[str]:
    return [urlsplit(visit.url).netloc + urlsplit(visit.url).path for visit in visits]


def finish(frontier: Frontier, visits: Iterable[Visit], now: float = 0.0) -> None:
    for visit in visits:
        frontier.done(visit, now)


def make(*starts: str, depth: int = 3, at_once: int = 100, follow_hosts: bool = False, visited: Iterable[str] = ()) -> Frontier:
    return Frontier(starts, depth=depth, at_once=at_once, follow_hosts=follow_hosts, visited=visited)


def test_sites_take_turns_however_many_urls_each_has() -> None:
    frontier = make(*urls("big", 5), *urls("small", 2), *urls("medium", 3))
    assert len(frontier) == 10
    assert places(take(frontier)) == [
        *("big/0", "small/0", "medium/0"),
        *("big/1", "small/1", "medium/1"),
        *("big/2", "medium/2"),
        *("big/3", "big/4"),
    ]
    assert len(frontier) == 0
    assert not frontier.is_finished


def test_a_site_that_comes_late_waits_for_one_round() -> None:
    frontier = make(*urls("big", 1000), url("hub"), follow_hosts=True)
    visits = [visit for _ in range(6) if (visit := frontier.next(0))]
    for visit in visits:
        if visit.is_robots:
            frontier.learn(visit, ALL_ALLOWED)
            frontier.done(visit, 0)
    frontier.follow(Page(url("hub"), 200, links=(url("late"),)), 0)
    first = [frontier.next(0) for _ in range(4)]
    assert [visit.host for visit in first if visit] == ["big", "hub", "late", "big"]


def test_a_site_has_no_more_than_its_share_under_way() -> None:
    frontier = make(*urls("slow", 9), *urls("fast", 4), at_once=2)
    visits = take(frontier)
    assert places(visits) == ["slow/0", "fast/0", "slow/1", "fast/1"]
    finish(frontier, [visits[1]])
    assert places(take(frontier)) == ["fast/2"]
    finish(frontier, [visits[3]])
    assert places(take(frontier)) == ["fast/3"]
    finish(frontier, [visits[0]])
    assert places(take(frontier)) == ["slow/2"]


def test_nothing_of_a_site_is_handed_out_before_its_robots_txt_was_read() -> None:
    frontier = make(*urls("a", 2), "https://b/1")
    a, b = frontier.next(0), frontier.next(0)
    assert a == Visit("http://a/robots.txt", "a", is_robots=True)
    assert b == Visit("https://b/robots.txt", "b", is_robots=True)
    assert frontier.next(0) is None
    frontier.learn(b, ALL_ALLOWED)
    frontier.done(b, 0)
    assert places([visit for visit in [frontier.next(0)] if visit]) == ["b/1"]
    assert frontier.next(0) is None


def test_what_is_disallowed_is_counted_and_never_handed_out() -> None:
    rules = Rules.of("User-agent: *\nDisallow: /2")
    frontier = make(*urls("a", 4))
    visits = take(frontier, rules=rules)
    assert places(visits) == ["a/0", "a/1", "a/3"]
    finish(frontier, visits)
    assert frontier.disallowed == 1
    assert frontier.is_finished


def test_urls_of_a_site_whose_robots_txt_cannot_be_had_are_handed_out_as_refused() -> None:
    frontier = make(*urls("a", 2))
    assert [visit.refusal for visit in take(frontier, rules=Rules(refusal="robots.txt: timeout"))] == ["robots.txt: timeout"] * 2


def test_a_delay_lies_between_the_end_of_a_visit_and_the_next_one() -> None:
    slow = Rules(delay=5.0)
    frontier = make(*urls("a", 2), *urls("b", 1))
    (robots, _) = [frontier.next(0), frontier.next(0)]
    assert robots is not None
    frontier.learn(robots, slow)
    frontier.done(robots, 10)
    assert frontier.next(10) is None
    assert frontier.next_time == 15
    assert frontier.next(14.9) is None
    first = frontier.next(15)
    assert first is not None
    assert (first.url, first.delay) == (url("a", 0), 5.0)
    assert frontier.next(1000) is None, "one at a time"
    assert frontier.next_time is None
    frontier.done(first, 20)
    assert frontier.next(24) is None
    assert places([visit for visit in [frontier.next(25)] if visit]) == ["a/1"]


def test_a_delay_holds_for_urls_that_are_found_later() -> None:
    frontier = make(url("a"))
    assert take(frontier, now=5, rules=Rules(delay=5.0)) == []
    (visit,) = take(frontier, now=10)
    frontier.done(visit, 12)
    frontier.follow(Page(url("a"), 200, links=(url("a", "later"),)), 0)
    assert frontier.next(16) is None
    assert places([visit for visit in [frontier.next(17)] if visit]) == ["a/later"]


def test_no_url_is_handed_out_twice_and_none_too_deep() -> None:
    frontier = make(url("a"), depth=1)
    (start,) = take(frontier)
    page = Page(url("a"), 200, links=(url("a"), url("a", "x"), url("a", "x"), url("elsewhere")))
    frontier.follow(page, start.depth)
    frontier.follow(page, start.depth)
    (x,) = take(frontier)
    assert (x.url, x.depth) == (url("a", "x"), 1)
    frontier.follow(Page(x.url, 200, links=(url("a", "y"),)), x.depth)
    assert take(frontier) == []


@pytest.mark.parametrize(("follow_hosts", "found"), [(False, []), (True, ["b/"])])
def test_other_hosts_are_followed_when_asked_to(follow_hosts: bool, found: list[str]) -> None:
    frontier = make(url("a"), follow_hosts=follow_hosts)
    take(frontier)
    frontier.follow(Page(url("a"), 200, links=(url("b"),)), 0)
    assert places(take(frontier)) == found


def test_a_start_that_has_moved_takes_its_host_along() -> None:
    frontier = make(url("a"), url("c"), depth=0)
    take(frontier)
    frontier.follow(Page(url("c"), 200, links=(url("b", "x"),)), 0)
    frontier.follow(Page(url("a"), 301, links=(url("b", "x"),)), 0)
    assert places(take(frontier)) == ["b/x"]
    frontier.follow(Page(url("b", "x"), 301, links=(url("b", "y"),)), 1)
    assert take(frontier) == [], "only a start"


def test_what_was_visited_earlier_is_followed_and_not_visited() -> None:
    earlier = [Page(url("a"), 200, links=(url("a", 1), url("a", 2))), Page(url("a", 1), 200, links=(url("a", 3),))]
    frontier = make(url("a"), depth=2, visited=(page.url for page in earlier))
    for depth, page in enumerate(earlier):
        frontier.follow(page, depth)
    assert [(visit.url, visit.depth) for visit in take(frontier)] == [(url("a", 2), 1), (url("a", 3), 2)]


@given(st.lists(st.integers(0, 4), max_size=60), st.integers(1, 3), st.randoms(use_true_random=False))
def test_every_url_once_and_within_the_limits_in_whatever_order_visits_end(hosts: list[int], at_once: int, chance: Random) -> None:
    everything = [url(f"h{host}", number) for number, host in enumerate(hosts)]
    frontier = make(*everything, at_once=at_once)
    under_way: list[Visit] = []
    order: list[str] = []
    while not frontier.is_finished:
        while visit := frontier.next(0):
            under_way.append(visit)
        assert max(Counter(one.host for one in under_way).values()) <= at_once
        ended = under_way.pop(chance.randrange(len(under_way)))
        if ended.is_robots:
            frontier.learn(ended, ALL_ALLOWED)
        else:
            order.append(ended.url)
        frontier.done(ended, 0)
    assert sorted(order) == sorted(everything)


# The crawl


async def instant(frontier: Frontier, visit: Visit, rules: Rules = ALL_ALLOWED) -> None:
    await asyncio.sleep(0)
    if visit.is_robots:
        frontier.learn(visit, rules)


async def test_a_crawl_visits_what_its_visits_find_and_never_too_many_at_once() -> None:
    frontier = make(url("h0"), follow_hosts=True, depth=10)
    seen: list[str] = []
    under_way = most = 0

    async def visit(one: Visit) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await instant(frontier, one)
        if not one.is_robots:
            seen.append(one.url)
            if len(seen) <= 10:
                links = tuple(url(f"h{number}", len(seen)) for number in range(5))
                frontier.follow(Page(one.url, 200, links=links), one.depth)
        under_way -= 1

    await crawl(frontier, visit, at_once=3)
    assert (len(seen), len(set(seen)), most) == (51, 51, 3)


async def test_a_crawl_ends_when_all_that_is_left_is_disallowed() -> None:
    frontier = make(*urls("a", 3))

    async def visit(one: Visit) -> None:
        await instant(frontier, one, Rules.of("User-agent: *\nDisallow: /"))

    await crawl(frontier, visit, at_once=3)
    assert frontier.disallowed == 3


async def test_a_crawl_waits_for_delays() -> None:
    frontier = make(*urls("a", 3), *urls("b", 3))
    under_way: Counter[str] = Counter()
    order = []

    async def visit(one: Visit) -> None:
        assert not under_way[one.host]
        under_way[one.host] += 1
        order.append(one.url)
        await instant(frontier, one, replace(ALL_ALLOWED, delay=0.001))
        under_way[one.host] -= 1

    await crawl(frontier, visit, at_once=10)
    assert Counter(order) == Counter([*urls("a", 3), *urls("b", 3), url("a", "robots.txt"), url("b", "robots.txt")])


async def test_what_a_visit_raises_ends_the_crawl() -> None:
    frontier = make(*urls("a", 3))

    async def visit(one: Visit) -> None:
        await instant(frontier, one)
        if not one.is_robots:
            raise RuntimeError(one.url)

    with pytest.raises(ExceptionGroup) as raised:
        await crawl(frontier, visit, at_once=1)
    assert str(raised.value.exceptions[0]) == url("a", 0)


async def test_a_cancelled_crawl_cancels_its_visits() -> None:
    begun = asyncio.Event()
    cancelled = []

    async def visit(one: Visit) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(one.host)
            raise

    task = asyncio.create_task(crawl(make(url("a"), url("b")), visit, at_once=2))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(cancelled) == ["a", "b"]
