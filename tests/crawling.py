"""What the tests of the example crawler share: its modules to import, and its command to run and read."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("rich")
pytest.importorskip("selectolax")

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
SCRAPE = [sys.executable, str(EXAMPLES / "scrape.py")]
TIMEOUT = 45.0

# Last, so that nothing of these programs hides a module of anybody else's.
sys.path.append(str(EXAMPLES))

Page = dict[str, Any]
Mode = list[str]
"""The arguments with which the crawler runs on workers, or as one plain process."""


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


def failures(summary: str) -> dict[str, list[str]]:
    """The URLs that the summary of one crawl lists for each reason."""
    listed: dict[str, list[str]] = {}
    for line in summary.splitlines():
        if line.endswith(" failed"):
            reason = line.partition(", ")[2].rpartition(":")[0]
            listed[reason] = []
        elif line.startswith("    "):
            listed[reason].append(line.strip())
    return listed


def by_path(pages: list[Page]) -> dict[str, Page]:
    return {urlsplit(page["url"]).path: page for page in pages}
