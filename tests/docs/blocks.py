"""The code blocks of a Markdown page, in their order."""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

_PART = re.compile(
    r"^(?P<indent>[ \t]*)(?P<fence>```+)(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)(?P=fence)[ \t]*$"
    r"|^<!-- (?P<kind>prelude|skip|story)(?P<comment>.*?)-->",
    re.DOTALL | re.MULTILINE,
)
_TITLE = re.compile(r'\btitle="([^"]+)"')


@dataclass(frozen=True)
class Block:
    """A fenced block, or a comment that the tests read: `prelude`, `skip` or `story`."""

    page: Path
    line: int
    """The line of the page on which the text begins."""
    language: str
    title: str | None
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.title or self.language}"


def blocks_of(page: Path) -> list[Block]:
    source = page.read_text(encoding="utf-8")
    return [_block(page, source, found) for found in _PART.finditer(source)]


def _block(page: Path, source: str, found: re.Match[str]) -> Block:
    if kind := found["kind"]:
        line = source.count("\n", 0, found.start("comment")) + 1
        return Block(page, line, kind, None, found["comment"].strip(" "))
    line = source.count("\n", 0, found.start("text")) + 1
    title = _TITLE.search(found["info"])
    language = found["info"].split(maxsplit=1)[0] if found["info"].strip() else ""
    return Block(page, line, language, title[1] if title else None, textwrap.dedent(found["text"]))


def pages() -> list[Path]:
    return sorted(DOCS.rglob("*.md"))


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


def story_of(page: Path) -> str | None:
    """The file with the test of this page, when a test of its own runs its blocks."""
    return next((block.text.lstrip(": ").strip() for block in blocks_of(page) if block.language == "story"), None)


def new_side(diff: str) -> str:
    """The text after the change, without the headers."""
    lines = [line for line in diff.splitlines() if not line.startswith(("-", "+++", "@@"))]
    return textwrap.dedent("\n".join(line[1:] if line.startswith(("+", " ")) else line for line in lines))


def python_of(page: Path) -> Iterator[tuple[Block, str]]:
    """Each piece of Python on a page, except for what a prompt shows."""
    for block in blocks_of(page):
        if block.language in ("python", "prelude"):
            yield block, block.text
        elif block.language == "diff":
            yield block, new_side(block.text)
