"""The crawler and its site farm, as a person starts them: the real commands, their results asserted."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("rich")
pytest.importorskip("selectolax")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FARM = [sys.executable, str(EXAMPLES / "farm.py"), "--child"]
SCRAPE = [sys.executable, str(EXAMPLES / "scrape.py")]
TIMEOUT = 45.0
LAST_RELEASE = "/3.15/"

Page = dict[str, Any]
Mode = list[str]


@dataclass
class Farm:
    """The farm, over the pipes it has for its parent: a line in asks for its usage."""

    process: subprocess.Popen[str]
    starts: list[str]

    @classmethod
    def start(cls) -> "Farm":
        process = subprocess.Popen(FARM, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        return cls(process, json.loads(process.stdout.readline()))

    def usage(self) -> tuple[float, int]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("usage\n")
        self.process.stdin.flush()
        cpu, requests = json.loads(self.process.stdout.readline())
        return cpu, requests

    def end(self) -> int:
        self.process.communicate(timeout=TIMEOUT)
        return self.process.returncode


@pytest.fixture(scope="module")
def farm() -> Iterator[Farm]:
    farm = Farm.start()
    yield farm
    farm.process.terminate()
    assert farm.end() == 0


@pytest.fixture(params=[["--workers", "2"], ["--single"]], ids=["percore", "single"])
def mode(request: pytest.FixtureRequest) -> Mode:
    arguments: Mode = request.param
    return arguments


def scrape(*arguments: str | Path, code: int = 0) -> str:
    """Runs the crawler to its end and returns what it printed; it must end with `code` and no complaint."""
    command = [*SCRAPE, *map(str, arguments)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert (done.returncode, done.stderr) == (code, ""), done.stdout
    return done.stdout


def read_pages(path: Path) -> list[Page]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def figure(summary: str, name: str) -> list[str]:
    """The cells of one line of the summary."""
    (line,) = (line for line in summary.splitlines() if line.startswith(f"│ {name} "))
    return [cell.strip() for cell in line.strip("│").split("│")][1:]


def by_path(pages: list[Page]) -> dict[str, Page]:
    return {urlsplit(page["url"]).path: page for page in pages}


def test_every_page_is_visited_once(farm: Farm, mode: Mode, tmp_path: Path) -> None:
    output = tmp_path / "pages.jsonl"
    summary = scrape(*mode, *farm.starts[:3], "--depth", "2", "--output", output)
    pages = read_pages(output)
    urls = [page["url"] for page in pages]
    assert len(urls) == len(set(urls)) > 900
    assert not [url for url in urls if "#" in url]
    assert {urlsplit(url).netloc for url in urls} == {urlsplit(url).netloc for url in farm.starts[:3]}
    good = [page for page in pages if page["status"] == 200]
    assert all(page["words"] > 0 and page["size"] > 0 and page["links"] for page in good if page["title"] != "At last")
    assert by_path(pages)["/3.13/json.html"]["title"] == "Python: json"
    assert figure(summary, "pages") == [str(len(good))]
    assert "all visited" in figure(summary, "seconds")[0]


def test_pages_are_fetched_in_all_workers(farm: Farm, tmp_path: Path) -> None:
    output = tmp_path / "pages.jsonl"
    summary = scrape("--workers", "2", "--seconds", "2", "--output", output, *farm.starts)
    assert {page["worker"] for page in read_pages(output)} == {0, 1}
    shares = re.findall(r"(\d): (\d+)%", figure(summary, "workers' shares")[0])
    assert [worker for worker, _ in shares] == ["0", "1"]
    assert sum(int(share) for _, share in shares) in {99, 100, 101}
    assert float(figure(summary, "pages/s")[0]) > 0
    assert "time is up" in figure(summary, "seconds")[0]


def test_a_single_process_has_no_workers(farm: Farm, tmp_path: Path) -> None:
    output = tmp_path / "pages.jsonl"
    scrape("--single", "--depth", "1", "--output", output, farm.starts[0])
    assert {page["worker"] for page in read_pages(output)} == {None}


def test_a_file_of_urls_and_every_kind_of_failure(farm: Farm, mode: Mode, tmp_path: Path) -> None:
    site = farm.starts[0]
    names = ("slow", "error", "missing", "reset", "moved", "everything")
    urls = tmp_path / "urls.txt"
    urls.write_text("# what can go wrong\n\n" + "".join(f"{site}{name}.html#top\n" for name in names))
    output = tmp_path / "pages.jsonl"
    # Nobody listens on port 9 of an address that is no site of the farm.
    summary = scrape(*mode, "--input", urls, "http://127.1.2.3:9/", "--depth", "0", "--timeout", "0.9", "--output", output)
    pages = by_path(read_pages(output))
    assert {path: page["error"] for path, page in pages.items()} == {
        "/slow.html": "timeout",
        "/error.html": "HTTP 500",
        "/missing.html": "HTTP 404",
        "/reset.html": "connection reset",
        "/": "cannot connect",
        "/moved.html": "",
        LAST_RELEASE: "",
        "/everything.html": "",
    }
    assert pages["/moved.html"]["status"] == 301
    assert pages["/everything.html"]["size"] > 2_000_000
    assert figure(summary, "failed") == ["5"]
    for kind in ("timeout", "HTTP 500", "HTTP 404", "connection reset", "cannot connect"):
        assert figure(summary, kind)[0] == "1"
    assert f"{site}missing.html" in summary


@pytest.mark.parametrize(("options", "hosts"), [((), 1), (("--follow-hosts",), 3)])
def test_a_crawl_stays_on_its_hosts_unless_told_otherwise(farm: Farm, tmp_path: Path, options: tuple[str, ...], hosts: int) -> None:
    output = tmp_path / "pages.jsonl"
    scrape("--single", "--depth", "1", "--output", output, farm.starts[5], *options)
    assert len({urlsplit(page["url"]).netloc for page in read_pages(output)}) == hosts


def test_ctrl_c_keeps_what_it_has(farm: Farm, mode: Mode, tmp_path: Path) -> None:
    """Read through a named pipe, so that the interrupt comes in the middle of the crawl, however fast it is."""
    fifo = tmp_path / "pages.jsonl"
    os.mkfifo(fifo)
    command = [*SCRAPE, *mode, "--output", str(fifo), *farm.starts]
    pipe = subprocess.PIPE
    crawler = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
    try:
        with fifo.open(encoding="utf-8") as lines:
            pages = [json.loads(lines.readline()) for _ in range(50)]
            os.killpg(crawler.pid, signal.SIGINT)  # as a terminal does it: to every process of the group
            pages += [json.loads(line) for line in lines]
        summary, complaints = crawler.communicate(timeout=TIMEOUT)
    finally:
        crawler.kill()
        crawler.communicate()
    assert (crawler.returncode, complaints) == (130, "")
    assert "interrupted" in figure(summary, "seconds")[0]
    assert sum(int(figure(summary, name)[0]) for name in ("pages", "redirects", "failed")) == len(pages)
    with pytest.raises(ProcessLookupError):
        os.killpg(crawler.pid, 0)


def test_without_arguments_it_compares_itself_on_the_farm() -> None:
    summary = scrape("--seconds", "2")
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
    ],
)
def test_a_bad_command_line_gets_a_sentence(arguments: list[str], sentence: str) -> None:
    done = subprocess.run([*SCRAPE, *arguments], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 2
    assert sentence in done.stderr


def test_the_farm_counts_what_it_serves(farm: Farm) -> None:
    cpu_before, requests_before = farm.usage()
    scrape("--single", "--depth", "0", *farm.starts)
    cpu, requests = farm.usage()
    assert requests - requests_before == len(farm.starts) == 64
    assert cpu > cpu_before


def test_the_farm_ends_when_its_parent_is_killed() -> None:
    """The farm shares its parent's standard error: that is at its end only when both have gone."""
    parent = "import os, signal; from farm import Farm; farm = Farm(); os.kill(os.getpid(), signal.SIGKILL)"
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES)}
    command = [sys.executable, "-c", parent]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT, check=False, env=environment)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
