"""The crawler's manners, judged from the other side: by what the farm has seen of it, and by its own record."""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from tests.crawling import ROOT, SCRAPE, TIMEOUT, Mode, Page, failures, figure, read_pages, scrape
from tests.terminals import shown_at_terminal

from farm import Farm, Visits  # isort: skip
from sites import PRIVATE, ROBOTS  # isort: skip

SITES = 8  # one of each kind
KILLS = 6  # of workers, in one crawl
PER_HOST = 2
FULL = Path("/dev/full")
QUICK = ("--depth", "20", "--per-host", str(PER_HOST), "--backoff", "0.05")


@pytest.fixture(scope="module")
def farm() -> Iterator[Farm]:
    farm = Farm(sites=SITES, modules=6, releases=2, slow=0.05, latency=0.02)
    yield farm
    assert farm.close() == 0


@pytest.fixture(scope="module")
def farm_that_hangs() -> Iterator[Farm]:
    """Its slow pages take longer than anybody waits."""
    farm = Farm(sites=SITES, modules=3, releases=1, slow=600, latency=0.02)
    yield farm
    assert farm.close() == 0


def site(visits: dict[str, Visits], number: int) -> Visits:
    return list(visits.values())[number]


def failed_by_themselves(farm: Farm) -> dict[str, list[str]]:
    """The failures that a whole crawl of the farm has to list."""
    reasons: dict[str, list[str]] = {}
    for url, status in farm.pages().items():
        if status >= 400 or not status:
            reasons.setdefault(f"HTTP {status}" if status else "connection reset", []).append(url)
    return {reason: sorted(urls) for reason, urls in reasons.items()}


def check_whole(farm: Farm, pages: list[Page]) -> None:
    """That the record has every page of the farm once, as the farm has it, and nothing else."""
    assert Counter(page["url"] for page in pages) == Counter(farm.pages().keys())
    assert {page["url"]: page["status"] for page in pages} == farm.pages()
    assert all(bool(page["error"]) == (page["status"] >= 400 or not page["status"]) for page in pages)


def check_polite(farm: Farm) -> None:
    visits = farm.visits()
    assert {host: seen.now for host, seen in visits.items()} == dict.fromkeys(visits, 0)
    # Not below it either: who may have two at once takes them, and the farm has counted that.
    assert max(seen.most_at_once for seen in visits.values()) == PER_HOST


def check_workers(pages: list[Page], *, is_single: bool) -> None:
    """Workers have fetched these pages, and those of a host are of one worker.

    Hashes, which nobody knows beforehand, assign hosts to workers: once in 128 times one worker has all eight.
    """
    workers: dict[str, set[int]] = {}
    for page in pages:
        if not page["error"]:
            workers.setdefault(urlsplit(page["url"]).netloc, set()).add(page["worker"])
    assert {len(ones) for ones in workers.values()} == {1}, "a host stays in one worker"
    used: set[int | None] = set().union(*workers.values())
    assert used == {None} if is_single else used <= {0, 1}


# Politeness


def test_a_whole_crawl_is_polite_and_a_host_stays_in_one_worker(farm: Farm, mode: Mode, tmp_path: Path) -> None:
    farm.forget()
    output = tmp_path / "pages.jsonl"
    summary = scrape(*mode, *farm.starts, *QUICK, "--output", output)
    pages = read_pages(output)
    check_whole(farm, pages)
    check_polite(farm)
    check_workers(pages, is_single=mode == ["--single"])
    visits = farm.visits()
    for number, seen in enumerate(visits.values()):
        assert next(iter(seen.paths)) == ROBOTS, "before anything else"
        # Four attempts at what fails for good, one at what is not there, and as many as it takes at what passes.
        expected = {"/error.html": 4, "/missing.html": 1, ROBOTS: 2 if number == 5 else 1}
        expected |= {"/flaky.html": 2} if number % 4 == 1 else {}
        expected |= {"/flakier.html": 3} if number % 4 == 2 else {}
        expected |= {"/busy.html": 2} if number % 4 == 3 else {}
        again = {path: times for path, times in seen.paths.items() if times > 1 and path != "/reset.html"}
        assert again == {path: times for path, times in expected.items() if times > 1}
        assert seen.paths["/missing.html"] == 1
        private = {path for path in seen.paths if path.startswith(PRIVATE)}
        assert private == ({f"{PRIVATE}diary.html", f"{PRIVATE}secret.html"} if number == 6 else set())
    assert site(visits, 0).paths["/reset.html"] >= 4  # aiohttp repeats by itself what a kept connection has lost
    assert failures(summary) == failed_by_themselves(farm)
    assert figure(summary, "forbidden by robots.txt") == [str(SITES - 1)]
    assert "all visited" in figure(summary, "seconds")[0]


def test_a_rate_and_the_wishes_of_sites_are_kept(farm: Farm, mode: Mode) -> None:
    """Site 3 asks for a rest of two seconds, site 7 until a time of day. Their next request comes after that."""
    farm.forget()
    rate = 25
    scrape(*mode, farm.starts[3], farm.starts[7], *QUICK, "--depth", "1", "--per-host", "1", "--rate", str(rate))
    for number in (3, 7):
        seen = site(farm.visits(), number)
        assert seen.paths["/busy.html"] == 2
        assert seen.early == 0
    farm.forget()
    scrape(*mode, farm.starts[1], *QUICK, "--per-host", "4", "--retries", "0", "--rate", str(rate))
    seen = site(farm.visits(), 1)
    assert seen.paths.total() > 15
    # Half of it, since the first request may have come late.
    assert seen.last - seen.first > 0.5 * (seen.paths.total() - 1) / rate


def test_who_has_timed_out_no_longer_counts_and_is_no_more_than_that(farm_that_hangs: Farm, mode: Mode, tmp_path: Path) -> None:
    farm = farm_that_hangs
    farm.forget()
    output = tmp_path / "pages.jsonl"
    summary = scrape(*mode, *farm.starts, *QUICK, "--timeout", "2", "--retries", "2", "--output", output)
    check_polite(farm)
    visits = farm.visits()
    slow = [url for url in farm.pages() if url.endswith("/slow.html")]
    assert len(slow) == 2
    assert [visits[urlsplit(url).netloc].paths["/slow.html"] for url in slow] == [3, 3]
    assert failures(summary) == failed_by_themselves(farm) | {"timeout": slow}
    reasons = {page["url"]: page["error"] for page in read_pages(output)}
    assert [reasons[url] for url in slow] == ["timeout", "timeout"]


# Workers that die


@contextmanager
def crawling(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A crawl whose record is its standard output, so that its progress is known. Killed at the end."""
    command = [*SCRAPE, *arguments, "--output", "/dev/stdout"]
    pipe = subprocess.PIPE
    crawler = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        yield crawler
    finally:
        crawler.kill()
        crawler.communicate()


def lines_of(crawler: "subprocess.Popen[str]") -> Iterator[str]:
    assert crawler.stdout is not None
    return iter(crawler.stdout.readline, "")


def strike(crawler: "subprocess.Popen[str]", turn: int) -> bool:
    """Kills a worker of the crawler's, one after the other in turns. False if there was none."""
    servers = psutil.Process(crawler.pid).children()
    workers = sorted((worker for server in servers for worker in server.children()), key=lambda worker: worker.pid)
    if workers:
        workers[turn % len(workers)].kill()
    return bool(workers)


def test_deaths_cost_no_page() -> None:
    """A worker is killed after every 30 pages, and every page is in the record once: none fails that would not by itself."""
    with Farm(sites=SITES, modules=12, releases=2, slow=0.05, latency=0.02) as farm:
        pages: list[Page] = []
        summary = ""
        kills = wanted = 0
        # The page that comes at its third attempt has one more for each death, whatever the deaths hit.
        patience = ("--retries", str(2 + KILLS), "--timeout", "30", *QUICK, "--backoff", "0.005")
        with crawling("--workers", "2", *patience, *farm.starts) as crawler:
            for line in lines_of(crawler):
                if not line.startswith("{"):
                    summary += line
                    continue
                pages.append(json.loads(line))
                wanted += len(pages) % 30 == 0
                if kills < min(wanted, KILLS):
                    kills += strike(crawler, kills)
            _, complaints = crawler.communicate(timeout=TIMEOUT)
        assert crawler.returncode == 0, complaints
        assert kills == KILLS
        assert Counter(page["url"] for page in pages) == Counter(farm.pages().keys())
        # What fails by itself may have a death as its last attempt: the reason is that of the last one.
        itself = sorted(url for urls in failed_by_themselves(farm).values() for url in urls)
        assert sorted(page["url"] for page in pages if page["error"]) == itself
        assert sorted(url for urls in failures(summary).values() for url in urls) == itself
        # At least what the farm's own failures cost; most deaths hit something under way and cost more.
        assert int(figure(summary, "retried")[0]) > 3 * SITES
        check_polite(farm)


# Resuming


def test_an_interrupted_crawl_is_resumed_where_it_was(farm: Farm, mode: Mode, tmp_path: Path) -> None:
    farm.forget()
    with crawling(*mode, *QUICK, "--retries", "60", *farm.starts) as crawler:
        # The pages that always fail are tried again for hours: the crawl is under way when it is interrupted.
        lines = lines_of(crawler)
        first = list(itertools.islice(lines, 60))
        os.killpg(crawler.pid, signal.SIGINT)  # as a terminal does it: to every process of the group
        first += [line for line in lines if line.startswith("{")]
        _, complaints = crawler.communicate(timeout=TIMEOUT)
    assert (crawler.returncode, complaints) == (130, "")
    assert len(first) < len(farm.pages())
    output = tmp_path / "pages.jsonl"
    output.write_text("".join(first) + '{"url": "http://127.0.', encoding="utf-8")
    farm.forget()
    summary = scrape(*mode, *QUICK, *farm.starts, "--output", output, "--resume")
    pages = read_pages(output)
    check_whole(farm, pages)
    asked = {f"http://{host}{path}" for host, seen in farm.visits().items() for path in seen.paths}
    had = {json.loads(line)["url"] for line in first}
    assert not asked & had
    assert sum(int(figure(summary, name)[0]) for name in ("pages", "redirects", "failed")) == len(pages) - len(had)


def test_a_finished_crawl_has_nothing_to_resume_but_what_may_have_passed(farm: Farm, tmp_path: Path) -> None:
    output = tmp_path / "pages.jsonl"
    command = ("--single", farm.starts[0], "--depth", "20", "--retries", "0", "--output", output, "--resume")
    scrape(*command)
    before = read_pages(output)
    farm.forget()
    scrape(*command)
    assert Counter(page["url"] for page in read_pages(output)) == Counter(page["url"] for page in before)
    assert set(site(farm.visits(), 0).paths) == {ROBOTS, "/error.html", "/reset.html"}


def test_a_record_is_not_overwritten_unasked(tmp_path: Path) -> None:
    output = tmp_path / "pages.jsonl"
    output.write_text("{}\n")
    command = [*SCRAPE, "http://127.0.0.1:9/", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"{output} has pages already: --resume continues it, or choose another name\n"
    assert output.read_text() == "{}\n"


@pytest.mark.skipif(not FULL.exists(), reason="this system has no full disk")
def test_a_full_disk_gets_a_sentence(farm: Farm, mode: Mode) -> None:
    command = [*SCRAPE, *mode, farm.starts[0], farm.starts[1], "--output", str(FULL)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert (done.returncode, done.stderr) == (1, f"cannot write {FULL}: No space left on device\n")


def test_a_crawl_without_any_page_fails(mode: Mode) -> None:
    summary = scrape(*mode, "http://127.0.0.1:9/", "--retries", "0", code=1)
    assert figure(summary, "pages") == ["0"]
    assert figure(summary, "workers' shares") == ["one process" if mode == ["--single"] else "no pages"]


def test_the_live_table_says_which_crawl_runs_and_for_how_long(farm: Farm) -> None:
    command = [*SCRAPE, "--compare", "--workers", "2", farm.starts[0], "--depth", "1", "--seconds", "30", "--backoff", "0.05"]
    code, shown = shown_at_terminal(command, os.environ)
    assert code == 0
    for crawl in (r"percore \(crawl 1 of 2\)", r"one process \(crawl 2 of 2\)"):
        assert re.search(rf"{crawl}, \d+ of at most 30 s: \d+ pages", shown), shown


# Side by side


def test_a_comparison_crawls_twice_and_records_once(farm: Farm, tmp_path: Path) -> None:
    farm.forget()
    output = tmp_path / "pages.jsonl"
    summary = scrape(
        "--compare", "--workers", "2", farm.starts[0], farm.starts[4], "--depth", "1", "--retries", "0", "--output", output
    )
    pages = read_pages(output)
    assert len({page["url"] for page in pages}) == len(pages)
    (first, second) = figure(summary, "pages")
    assert first == second == str(sum(page["status"] == 200 for page in pages))
    assert site(farm.visits(), 0).paths["/"] == 2
    assert re.search(r"^percore: \d+\.\d\d times the pages/s of one process", summary, re.MULTILINE)


# The page that explains it


def test_the_example_of_the_page_about_crawling_runs(farm: Farm, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "how-to" / "crawling.md").read_text(encoding="utf-8")
    script = tmp_path / "polite.py"
    script.write_text(re.findall(r"```python title[^\n]*\n(.*?)```", text, re.DOTALL)[0], encoding="utf-8")
    urls = [f"{start}{page}" for start in farm.starts[1:4] for page in ("3.12/abc.html", "missing.html", "3.12/")]
    farm.forget()
    done = subprocess.run([sys.executable, str(script), *urls], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = sorted(done.stdout.splitlines())
    assert [line.partition(" ")[0] for line in lines] == sorted(urls)
    assert [line.endswith("404") for line in lines] == ["missing" in url for url in sorted(urls)]
    assert all(seen.paths.total() == (3 if seen.paths else 0) for seen in farm.visits().values())
