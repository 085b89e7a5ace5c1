"""The crawler and its site farm, as a person starts them: the real commands, their results asserted."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.crawling import EXAMPLES, SCRAPE, TIMEOUT, Mode, by_path, failures, figure, read_pages, scrape
from tests.faults import complaints

from farm import Farm  # isort: skip
from scrape import read_command_line  # isort: skip

LAST_RELEASE = "/3.15/"
MANY = 64  # sites


@pytest.fixture(scope="module")
def farm() -> Iterator[Farm]:
    # Pages that take so long that no crawl which meets them ends by itself before it is ended.
    farm = Farm(sites=MANY, modules=12, slow=30)
    yield farm
    assert farm.close() == 0


def test_every_page_is_visited_once(farm: Farm, mode: Mode, tmp_path: Path) -> None:
    output = tmp_path / "pages.jsonl"
    starts = farm.starts[1:4]
    summary = scrape(*mode, *starts, "--depth", "2", "--backoff", "0.05", "--output", output)
    pages = read_pages(output)
    urls = [page["url"] for page in pages]
    assert len(urls) == len(set(urls)) > 150
    assert not [url for url in urls if "#" in url]
    assert {urlsplit(url).netloc for url in urls} == {urlsplit(url).netloc for url in starts}
    good = [page for page in pages if page["status"] == 200]
    assert all(page["title"] and page["size"] > 0 for page in good)
    assert all(page["words"] > 0 and page["links"] for page in good if LAST_RELEASE in page["url"])
    assert by_path(pages)["/3.13/abc.html"]["title"] == "Python: abc"
    assert figure(summary, "pages") == [str(len(good))]
    assert "all visited" in figure(summary, "seconds")[0]


def test_pages_are_fetched_in_all_workers(farm: Farm, tmp_path: Path) -> None:
    output = tmp_path / "pages.jsonl"
    summary = scrape("--workers", "2", "--seconds", "1", "--output", output, *farm.starts)
    assert {page["worker"] for page in read_pages(output) if not page["error"]} == {0, 1}
    shares = re.findall(r"(\d): (\d+)%", figure(summary, "workers' shares")[0])
    assert [worker for worker, _ in shares] == ["0", "1"]
    assert sum(int(share) for _, share in shares) in {99, 100, 101}
    assert float(figure(summary, "pages/s")[0]) > 0
    assert "time is up" in figure(summary, "seconds")[0]


def test_a_single_process_has_no_workers(farm: Farm, tmp_path: Path) -> None:
    output = tmp_path / "pages.jsonl"
    scrape("--single", "--depth", "1", "--output", output, farm.starts[3])
    pages = read_pages(output)
    assert len(pages) > 1
    assert {page["worker"] for page in pages} == {None}


def test_a_file_of_urls_and_every_kind_of_failure(farm: Farm, mode: Mode, tmp_path: Path) -> None:
    site = farm.starts[0]
    names = ("slow", "error", "missing", "reset", "moved", f"{LAST_RELEASE[1:]}everything")
    urls = tmp_path / "urls.txt"
    urls.write_text("# what can go wrong\n\n" + "".join(f"{site}{name}.html#top\n" for name in names))
    output = tmp_path / "pages.jsonl"
    short = ("--depth", "0", "--timeout", "0.9", "--retries", "1", "--backoff", "0.05")
    # Nobody listens on port 9 of an address that is no site of the farm.
    summary = scrape(*mode, "--input", urls, "http://127.1.2.3:9/", *short, "--output", output)
    pages = by_path(read_pages(output))
    assert {path: page["error"] for path, page in pages.items()} == {
        "/slow.html": "timeout",
        "/error.html": "HTTP 500",
        "/missing.html": "HTTP 404",
        "/reset.html": "connection reset",
        "/": "robots.txt: cannot connect",
        "/moved.html": "",
        LAST_RELEASE: "",
        f"{LAST_RELEASE}everything.html": "",
    }
    assert pages["/moved.html"]["status"] == 301
    assert pages["/missing.html"]["status"] == 404
    assert pages[f"{LAST_RELEASE}everything.html"]["size"] > 200_000
    assert figure(summary, "failed") == ["5"]
    assert figure(summary, "retried") == ["3"]
    assert failures(summary) == {page["error"]: [page["url"]] for page in pages.values() if page["error"]}


@pytest.mark.parametrize(("options", "hosts"), [((), 1), (("--follow-hosts",), 3)])
def test_a_crawl_stays_on_its_hosts_unless_told_otherwise(farm: Farm, tmp_path: Path, options: tuple[str, ...], hosts: int) -> None:
    output = tmp_path / "pages.jsonl"
    scrape("--single", "--depth", "1", "--output", output, farm.starts[5], *options)
    assert len({urlsplit(page["url"]).netloc for page in read_pages(output)}) == hosts


def test_ctrl_c_keeps_what_it_has(farm: Farm, mode: Mode, tmp_path: Path) -> None:
    """Read through a named pipe, so that the interrupt comes in the middle of the crawl, however fast it is."""
    fifo = tmp_path / "pages.jsonl"
    os.mkfifo(fifo)
    command = [*SCRAPE, *mode, "--timeout", "60", "--output", str(fifo), *farm.starts]
    pipe = subprocess.PIPE
    crawler = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        with fifo.open(encoding="utf-8") as lines:
            pages = [json.loads(lines.readline()) for _ in range(50)]
            os.killpg(crawler.pid, signal.SIGINT)  # as a terminal does it: to every process of the group
            pages += [json.loads(line) for line in lines]
        summary, said = crawler.communicate(timeout=TIMEOUT)
    finally:
        crawler.kill()
        crawler.communicate()
    assert (crawler.returncode, complaints(said)) == (130, "")
    assert "interrupted" in figure(summary, "seconds")[0]
    assert sum(int(figure(summary, name)[0]) for name in ("pages", "redirects", "failed")) == len(pages)
    with pytest.raises(ProcessLookupError):
        os.killpg(crawler.pid, 0)


def test_without_arguments_it_compares_itself_on_the_farm() -> None:
    summary = scrape("--seconds", "1")
    percore, single = (float(cell) for cell in figure(summary, "pages/s"))
    assert min(percore, single) > 0
    for cell in figure(summary, "the farm's own CPU share"):
        assert re.match(r"\d+% of \d+ CPUs \(\d+\.\d s\)$", cell)
    ratio = re.search(r"^percore: (\d+\.\d\d) times the pages/s of one process, on \d+ CPUs$", summary, re.MULTILINE)
    assert ratio is not None
    assert float(ratio[1]) == pytest.approx(percore / single, rel=0.05)


def test_a_live_display_on_a_terminal(farm: Farm) -> None:
    terminal, other_end = pty.openpty()
    command = [*SCRAPE, "--workers", "2", "--seconds", "1", *farm.starts]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    crawler = subprocess.Popen(command, stdin=other_end, stdout=other_end, stderr=other_end, env=environment)
    os.close(other_end)
    try:
        shown = read_terminal(terminal)
        assert crawler.wait(TIMEOUT) == 0
    finally:
        os.close(terminal)
        crawler.kill()
        crawler.wait()
    assert re.search(r"\d+ pages, \d+ pages/s, \d+ waiting", shown)
    assert {"0", "1"} <= set(re.findall(r"│ (\d) +│ \d+ +│ ready", shown))


def read_terminal(terminal: int) -> str:
    """All that is shown on it until its last user closes it, which Linux reports as EIO; without the colours."""
    shown = b""
    try:
        while chunk := os.read(terminal, 65536):
            shown += chunk
    except OSError:
        pass
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["ftp://example.com/"], "not a URL that begins with http:// or https://: ftp://example.com/"),
        (["--input", "/nonexistent"], "cannot read /nonexistent"),
        (["--workers", "0"], "argument --workers"),
        (["--seconds", "nan"], "argument --seconds"),
        (["--per-host", "0"], "argument --per-host"),
        (["--retries", "-1"], "argument --retries"),
        (["--backoff", "0"], "argument --backoff"),
        (["--depth", "-1"], "argument --depth"),
        (["--resume", "http://a/"], "--resume continues the crawl in --output: give its file"),
        (["--resume", "--output", "x"], "--resume needs the URLs of the crawl that it continues"),
        (["--resume", "--output", "x", "--compare", "http://a/"], "--compare needs two whole crawls"),
        (["--single", "--compare"], "--single is one half of --compare"),
    ],
)
def test_a_bad_command_line_gets_a_sentence(
    arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [SCRAPE[-1], *arguments])
    with pytest.raises(SystemExit) as ended:
        read_command_line()
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


def test_the_farm_counts_what_it_serves(farm: Farm) -> None:
    farm.forget()
    scrape("--single", "--depth", "0", "--retries", "1", "--backoff", "0.05", *farm.starts)
    usage = farm.usage()
    # A start page and a robots.txt of each site; an eighth of these fails once, and an eighth has moved.
    assert usage.requests == MANY * 2 + MANY // 8 * 2
    assert usage.cpu > 0
    visits = farm.visits().values()
    assert (len(visits), sum(one.now for one in visits)) == (MANY, 0)
    assert all(one.paths["/"] == 1 for one in visits)
    farm.forget()
    assert farm.usage().requests == 0


def test_the_farm_ends_when_its_parent_is_killed() -> None:
    """The farm shares its parent's standard error: that is at its end only when both have gone."""
    parent = "import os, signal; from farm import Farm; farm = Farm(sites=1, modules=1); os.kill(os.getpid(), signal.SIGKILL)"
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES)}
    command = [sys.executable, "-c", parent]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT, check=False, env=environment)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
