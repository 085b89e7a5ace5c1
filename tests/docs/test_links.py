"""Every link in docs/, README and the pages beside it leads somewhere. Links to other sites are checked for their form alone."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.docs.blocks import DOCS, ROOT, pages

REPOSITORY = "https://github.com/percore/percore"
BESIDE = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "tests/README.md")]
_CODE = re.compile(r"^([ \t]*)```.*?^\1```[ \t]*$|<!--.*?-->|(`+)[^`].*?\2", re.DOTALL | re.MULTILINE)
_LINK = re.compile(
    r"\]\(\s*([^)\s]+)(?:\s+\"[^\"]*\")?\s*\)"  # [text](link "title")
    r"|^\[[^\]]+\]:\s*(\S+)"  # [text]: link
    r"|<(https?://[^>]+)>"
    r"|(?:href|src)=\"([^\"]+)\"",
    re.MULTILINE,
)
_HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)


def links_of(page: Path) -> Iterator[str]:
    for found in _LINK.finditer(without_code(page)):
        yield next(link for link in found.groups() if link)


@cache
def without_code(page: Path) -> str:
    return _CODE.sub(lambda found: "\n" if found[1] is not None else "code", page.read_text(encoding="utf-8"))


@cache
def anchors_of(page: Path) -> frozenset[str]:
    """As both the site's builder and the forge make them of headings; explicit ones, and those that mkdocstrings makes."""
    source = page.read_text(encoding="utf-8")
    text = re.sub(r"^([ \t]*)```.*?^\1```[ \t]*$", "", source, flags=re.DOTALL | re.MULTILINE)
    anchors = {slug(heading) for heading in _HEADING.findall(text)}
    anchors |= set(re.findall(r"\{[^}]*#([\w.-]+)[^}]*\}", text)) | set(re.findall(r"\b(?:id|name)=\"([\w.-]+)\"", text))
    return frozenset(anchors | set(re.findall(r"^::: (\S+)", text, re.MULTILINE)))


def slug(heading: str) -> str:
    text = re.sub(r"\{[^}]*\}$", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", ""))
    kept = re.sub(r"[^\w\s-]", "", text.encode("ascii", "ignore").decode()).strip().lower()
    return re.sub(r"[-\s]+", "-", kept)


def check(page: Path, link: str) -> None:
    parts = urlsplit(link)
    if link.startswith(REPOSITORY):
        within_repository(parts.path.removeprefix(urlsplit(REPOSITORY).path), parts.fragment)
    elif parts.scheme:
        assert parts.scheme in ("https", "mailto"), link
        assert parts.netloc.count(".") or parts.scheme == "mailto", link
    else:
        target = page if not parts.path else (page.parent / parts.path).resolve()
        assert target.exists(), link
        assert not page.is_relative_to(DOCS) or target.is_relative_to(DOCS), (
            f"{link}: the site has docs/ alone; link to {REPOSITORY}"
        )
        assert not parts.fragment or parts.fragment in anchors_of(target), link


def within_repository(path: str, fragment: str) -> None:
    """Such as /blob/main/docs/testing.md."""
    found = re.fullmatch(r"/(?:blob|tree|raw)/main/(.+)", path)
    if found is None:
        assert path in ("", "/issues", "/security/advisories/new", "/discussions"), path
        return
    target = ROOT / found[1]
    assert target.exists(), path
    assert not fragment or fragment in anchors_of(target), f"{path}#{fragment}"


def test_each_link_leads_somewhere(subtests: pytest.Subtests) -> None:
    seen = 0
    for page in (*pages(), *BESIDE):
        for link in links_of(page):
            seen += 1
            with subtests.test(page=page.relative_to(ROOT).as_posix(), link=link):
                check(page, link)
    assert seen > 50


def test_texts_that_are_also_shown_elsewhere_have_full_links(subtests: pytest.Subtests) -> None:
    """The package index shows the README, and the site the two others."""
    for name in ("README.md", "CHANGELOG.md", "SECURITY.md"):
        with subtests.test(name=name):
            assert [link for link in links_of(ROOT / name) if not link.startswith("https://")] == []


@pytest.mark.parametrize(
    "text",
    ["[x](missing.md)", "[x](#missing)", "[x](../README.md)", "[x](http://example.com)", f"[x]({REPOSITORY}/blob/main/missing.md)"],
)
def test_a_wrong_link_fails(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.docs.test_links.DOCS", tmp_path / "docs")
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    (tmp_path / "README.md").touch()
    page.write_text(f"# A title\n\n[right](#a-title) `[code](not-a-link.md)` {text}\n")
    good, bad = links_of(page)
    check(page, good)
    with pytest.raises(AssertionError):
        check(page, bad)


def test_each_page_is_in_the_navigation() -> None:
    named = re.findall(r'"([\w./-]+\.md)"', (ROOT / "zensical.toml").read_text(encoding="utf-8"))
    assert sorted(named) == sorted(page.relative_to(DOCS).as_posix() for page in pages())
