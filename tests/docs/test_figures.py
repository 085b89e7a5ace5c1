"""Every measured figure on a page stands beside the command that measures it, or beside a link to the page of figures."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import DOCS, ROOT, pages

WRITTEN_BY_BENCHMARKS = {DOCS / "performance.md", DOCS / "performance-record.md"}
_NUMBER = r"(?<![\w.])\d[\d.,]*\d?\s?"
_RATE = r"(?:[kMG]?i?B|calls|items|pages|requests|records|rows|results|messages)(?:/s\b| (?:per|a) second\b)"
_FIGURE = re.compile(rf"{_NUMBER}(?:[×x] (?!\d)|µs\b|{_RATE}|times (?:as|faster|slower)\b|% (?:faster|slower)\b)")
_TIME = re.compile(rf"{_NUMBER}(?:ms|us|ns)\b")
_SOURCE = re.compile(r"`make [a-z]|`python -m |performance(?:-record)?\.md")


def unsourced(text: str) -> Iterator[str]:
    """A time in a table is measured; one in a sentence may be a bound, such as how long percore waits."""
    text = re.sub(r"^([ \t]*)```.*?^\1```[ \t]*$", "", text, flags=re.DOTALL | re.MULTILINE)
    before = ""
    for part in re.split(r"\n\s*\n", text):
        is_table = part.lstrip().startswith("|")
        found = _FIGURE.search(part) or (_TIME.search(part) if is_table else None)
        if found and not _SOURCE.search(part) and not (is_table and _SOURCE.search(before)):
            yield part
        before = before if is_table else part


def test_each_figure_names_where_it_comes_from(subtests: pytest.Subtests) -> None:
    for page in ({*pages(), ROOT / "README.md"}) - WRITTEN_BY_BENCHMARKS:
        with subtests.test(page=page.relative_to(ROOT).as_posix()):
            assert list(unsourced(Path(page).read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("figure", ["2 × as fast", "1.5 × the time", "30 µs", "12,000 calls/s", "1.2 GB/s", "3 times faster"])
def test_a_figure_needs_its_source(figure: str) -> None:
    assert list(unsourced(f"A map takes {figure}."))
    assert not list(unsourced(f"A map takes {figure} (`make bench`)."))
    assert not list(unsourced(f"`make bench` measures:\n\n| a map | {figure} |\n"))
    assert list(unsourced(f"`make bench` measures.\n\nOther.\n\n| a map | {figure} |\n"))


def test_bounds_are_no_figures() -> None:
    assert not list(unsourced("It waits up to 3 ms, for 2 x 3 items, within 64 MiB."))
