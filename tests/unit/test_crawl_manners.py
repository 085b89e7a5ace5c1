"""The example crawler's manners: what it may fetch, what it tries again, and what it has on record. No process, no network."""

import asyncio
import errno
import json
import os
import pickle
from datetime import UTC, datetime
from pathlib import Path
from urllib.robotparser import RobotFileParser

import aiohttp
import pytest

import percore
from tests import crawling  # noqa: F401  # makes the examples importable

from crawl.frontier import Visit  # isort: skip
from crawl.manners import LONGEST_PAUSE, LONGEST_REST, Manners, Pace, may_pass, reason_of, rest_of  # isort: skip
from crawl.pages import BadStatus, Page, RobotsFile, seconds_of  # isort: skip
from crawl.record import BadRecord, Record  # isort: skip
from crawl.robots import Rules, read_rules  # isort: skip

VISIT = Visit("http://a/robots.txt", "a", is_robots=True)
SITE = "http://a"


def died() -> percore.WorkerDied:
    return percore.WorkerDied(pid=1, exitcode=-9, call="fetch_page")


def cannot_connect(number: int) -> aiohttp.ClientConnectorError:
    key = aiohttp.client_reqrep.ConnectionKey("a", 80, False, True, None, None, None)
    return aiohttp.ClientConnectorError(key, OSError(number, os.strerror(number)))


# robots.txt


def rules_from(*answers: RobotsFile | BaseException) -> tuple[Rules, list[Visit]]:
    """What is concluded from these answers to one request after the other, and what was asked for."""
    asked = []
    given = iter(answers)

    async def fetch(visit: Visit) -> RobotsFile:
        asked.append(visit)
        answer = next(given)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return asyncio.run(read_rules(fetch, VISIT)), asked


def test_robots_txt_is_obeyed() -> None:
    rules, _ = rules_from(RobotsFile("User-agent: *\nDisallow: /private/\n\nUser-agent: somebody\nDisallow: /"))
    assert rules.allows(f"{SITE}/public.html")
    assert not rules.allows(f"{SITE}/private/diary.html")
    assert (rules.refusal, rules.delay) == ("", 0)


def test_a_group_for_this_crawler_counts_before_the_one_for_all() -> None:
    rules, _ = rules_from(RobotsFile("User-agent: *\nAllow: /\n\nUser-agent: percore-scrape\nCrawl-delay: 7\nDisallow: /"))
    assert not rules.allows(f"{SITE}/")
    assert rules.delay == 7


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410])
def test_no_robots_txt_forbids_nothing(status: int) -> None:
    rules, _ = rules_from(BadStatus(status))
    assert rules.allows(f"{SITE}/private/")
    assert rules.refusal == ""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (BadStatus(500), "HTTP 500"),
        (BadStatus(503), "HTTP 503"),
        (BadStatus(429), "HTTP 429"),
        (TimeoutError(), "timeout"),
        (cannot_connect(errno.ECONNREFUSED), "cannot connect"),
        (aiohttp.ServerDisconnectedError(), "disconnected"),
        (died(), "worker died"),
    ],
)
def test_a_robots_txt_that_cannot_be_had_forbids_all(error: BaseException, reason: str) -> None:
    rules, _ = rules_from(error)
    assert rules.refusal == f"robots.txt: {reason}"


def test_a_robots_txt_that_has_moved_is_asked_for_there_and_as_politely() -> None:
    rules, asked = rules_from(
        RobotsFile(location="https://b/robots.txt"), RobotsFile(location="https://c/r"), RobotsFile("User-agent: *\nDisallow: /")
    )
    assert [(visit.url, visit.host) for visit in asked] == [
        ("http://a/robots.txt", "a"),
        ("https://b/robots.txt", "b"),
        ("https://c/r", "c"),
    ]
    assert not rules.allows(f"{SITE}/")


def test_a_robots_txt_that_moves_on_and_on_forbids_nothing() -> None:
    rules, asked = rules_from(*[RobotsFile(location="http://a/robots.txt")] * 9)
    assert len(asked) == 6, "five redirects are followed"
    assert rules.allows(f"{SITE}/")


def test_a_robots_txt_that_has_moved_to_nowhere_forbids_nothing() -> None:
    assert rules_from(RobotsFile(location=""))[0].allows(f"{SITE}/")


class Unreading(RobotFileParser):
    """As the standard library's is with some URLs, which ones depends on its version."""

    def can_fetch(self, useragent: str, url: str) -> bool:
        raise ValueError(url)


def test_a_url_that_the_rules_cannot_read_is_not_allowed() -> None:
    assert not Rules(Unreading()).allows("http://a%5B/")


def test_a_fault_of_this_program_is_not_taken_for_the_sites() -> None:
    with pytest.raises(AttributeError):
        rules_from(AttributeError("x"))


# What is tried again


def test_what_may_pass_is_tried_again(subtests: pytest.Subtests) -> None:
    for error, passing, reason in [
        (BadStatus(500), True, "HTTP 500"),
        (BadStatus(503), True, "HTTP 503"),
        (BadStatus(429), True, "HTTP 429"),
        (BadStatus(404), False, "HTTP 404"),
        (BadStatus(403), False, "HTTP 403"),
        (TimeoutError(), True, "timeout"),
        (aiohttp.ServerTimeoutError(), True, "timeout"),
        (died(), True, "worker died"),
        (aiohttp.ClientOSError(errno.ECONNRESET, "reset"), True, "connection reset"),
        (aiohttp.ClientOSError(errno.EPIPE, "pipe"), True, "ClientOSError"),
        (aiohttp.ServerDisconnectedError(), True, "disconnected"),
        (aiohttp.ClientPayloadError("half of it"), True, "broken off"),
        (cannot_connect(errno.ECONNREFUSED), False, "cannot connect"),
        (cannot_connect(errno.ECONNRESET), True, "connection reset"),
        (aiohttp.InvalidURL("http://"), False, "InvalidURL"),
        (UnicodeError("a label is too long"), False, "UnicodeError"),
    ]:
        with subtests.test(error=error, passing=passing, reason=reason):
            assert may_pass(error) is passing
            assert reason_of(error) == reason


def test_a_bad_status_comes_out_of_a_pickle_as_it_was() -> None:
    error = pickle.loads(pickle.dumps(BadStatus(503, 2.5)))
    assert (type(error), error.status, error.retry_after, str(error), may_pass(error)) == (BadStatus, 503, 2.5, "HTTP 503", True)


def test_pauses_double_up_to_a_minute_and_are_not_all_the_same() -> None:
    manners = Manners(per_host=2, timeout=10, retries=3, backoff=2)
    for failed, usual in [(1, 2), (2, 4), (3, 8), (5, 32), (6, LONGEST_PAUSE), (2000, LONGEST_PAUSE)]:
        pauses = {manners.pause(failed) for _ in range(50)}
        assert usual * 0.5 <= min(pauses) < max(pauses) <= usual * 1.5


def test_a_gap_is_no_shorter_than_the_delay_that_a_site_asks_for() -> None:
    for rate, delay, gap in [(None, 0.0, 0.0), (None, 5.0, 5.0), (4.0, 0.0, 0.25), (4.0, 5.0, 5.0), (0.1, 5.0, 10.0)]:
        assert Manners(per_host=2, timeout=10, retries=3, backoff=0.1, rate=rate).gap(delay) == gap


def test_a_retry_after_has_seconds_or_a_date() -> None:
    now = datetime(2026, 11, 23, 12, 0, 0, tzinfo=UTC)
    for header, seconds in [
        ("120", 120),
        (" 0 ", 0),
        ("Mon, 23 Nov 2026 12:00:30 GMT", 30),
        ("Mon, 23 Nov 2026 12:00:30 -0000", 30),
        ("Mon, 23 Nov 2026 11:00:00 GMT", 0),
        ("", 0),
        ("soon", 0),
        ("-5", 0),
        ("1.5", 0),
        ("\u0663", 0),
    ]:
        assert seconds_of(header, now) == seconds, header


def test_a_site_that_wants_a_rest_gets_it_but_not_for_ever() -> None:
    assert rest_of(BadStatus(429, 7.0)) == 7.0
    assert rest_of(BadStatus(503, 1e9)) == LONGEST_REST
    assert rest_of(BadStatus(503)) == rest_of(TimeoutError()) == 0.0


async def test_in_one_process_requests_keep_their_pace() -> None:
    """However late they are: the least time that so many of them take."""
    pace = Pace()
    loop = asyncio.get_running_loop()
    times: list[float] = []
    began = loop.time()

    async def one() -> None:
        await pace.turn(0.01)
        times.append(loop.time())

    async with asyncio.TaskGroup() as group:
        for _ in range(5):
            group.create_task(one())
    assert all(time - began >= number * 0.01 for number, time in enumerate(times))
    pace.rest(0.02)
    began = loop.time()
    await pace.turn(0.0)
    assert loop.time() - began >= 0.02


# The record


def line(url: str, **values: object) -> str:
    return json.dumps({"url": url, "status": 200, "links": [], "depth": 1, **values}) + "\n"


def restored(path: Path) -> list[tuple[Page, int]]:
    with Record(path, resume=True) as record:
        return list(record.pages())


def test_a_record_gives_back_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "pages.jsonl"
    page = Page("http://a/", 200, 12, "A – title", 2, ("http://a/b",), seconds=0.5, worker=1)
    with Record(path, resume=False) as record:
        assert list(record.pages()) == []
        record.write(page, 3)
    assert restored(path) == [(page, 3)]


def test_each_page_is_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "pages.jsonl"
    with Record(path, resume=False) as record:
        record.write(Page("http://a/"), 0)
        assert json.loads(path.read_text())["url"] == "http://a/"


def test_a_resumed_record_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "pages.jsonl"
    path.write_text(line("http://a/1"))
    with Record(path, resume=True) as record:
        assert [page.url for page, _ in record.pages()] == ["http://a/1"]
        record.write(Page("http://a/2", 200), 1)
    assert [page.url for page, _ in restored(path)] == ["http://a/1", "http://a/2"]


@pytest.mark.parametrize("half", [line("http://a/2")[:-1], line("http://a/2")[:20], "{", "\0"])
def test_a_half_written_last_line_is_as_if_it_had_not_been_written(tmp_path: Path, half: str) -> None:
    path = tmp_path / "pages.jsonl"
    path.write_text(line("http://a/1") + half)
    assert [page.url for page, _ in restored(path)] == ["http://a/1"]
    assert path.read_text() == line("http://a/1")


@pytest.mark.parametrize(
    ("values", "stays"),
    [
        ({"status": 301}, True),
        ({"status": 404, "error": "HTTP 404"}, True),
        ({"status": 410, "error": "HTTP 410"}, True),
        ({"status": 429, "error": "HTTP 429"}, False),
        ({"status": 503, "error": "HTTP 503"}, False),
        ({"status": 0, "error": "timeout"}, False),
        ({"status": 0, "error": "robots.txt: HTTP 503"}, False),
    ],
    ids=lambda value: str(value),
)
def test_a_resumed_record_lets_go_of_failures_that_may_have_passed(tmp_path: Path, values: dict[str, object], stays: bool) -> None:
    path = tmp_path / "pages.jsonl"
    path.write_text(line("http://a/1", **values) + line("http://a/2"))
    path.chmod(0o640)
    assert [page.url for page, _ in restored(path)] == ["http://a/1", "http://a/2"][not stays :]
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_to_a_record_stays_one(tmp_path: Path) -> None:
    path, link = tmp_path / "pages.jsonl", tmp_path / "link"
    path.write_text(line("http://a/1") + "{")
    link.symlink_to(path)
    assert len(restored(link)) == 1
    assert link.is_symlink()
    assert path.read_text() == line("http://a/1")


@pytest.mark.parametrize("bad", ["[]\n", "nonsense\n", '{"url": 1}\n', '{"depth": 1}\n', line("http://a/", more=1)])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(line("http://a/1") + bad)
    with pytest.raises(BadRecord, match=r"other\.jsonl: line 2 is no page of this crawler"):
        Record(path, resume=True)
    assert path.read_text() == line("http://a/1") + bad
    assert list(tmp_path.iterdir()) == [path]


def test_pages_are_not_overwritten_unasked(tmp_path: Path) -> None:
    path = tmp_path / "pages.jsonl"
    path.write_text(line("http://a/1"))
    with pytest.raises(BadRecord, match=r"has pages already: --resume continues it"):
        Record(path, resume=False)
    assert path.read_text() == line("http://a/1")


def test_nothing_to_resume_is_a_new_record(tmp_path: Path) -> None:
    assert restored(tmp_path / "pages.jsonl") == []


def test_a_device_can_be_written_to() -> None:
    with Record(Path(os.devnull), resume=True) as record:
        record.write(Page("http://a/"), 0)
        assert list(record.pages()) == []


def test_a_record_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(BadRecord, match=r"cannot write .*: No such file or directory"):
        Record(tmp_path / "nowhere" / "pages.jsonl", resume=False)
