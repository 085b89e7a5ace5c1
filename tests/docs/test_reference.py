"""The reference has every public name, and every environment variable that percore reads."""

import re

import percore
from tests.docs.blocks import DOCS, ROOT

PAGES = {page: page.read_text(encoding="utf-8") for page in sorted((DOCS / "reference").glob("*.md"))}
DESCRIBED = {name for text in PAGES.values() for name in re.findall(r"^::: percore\.([\w.]+)$", text, re.MULTILINE)}


def test_each_public_name_has_its_entry() -> None:
    assert {name for name in DESCRIBED if "." not in name} == set(percore.__all__)


def test_each_verb_of_a_runner_has_its_entry() -> None:
    """The page of Runner has a part of them, and other pages have the rest."""
    listed = re.search(r"^      members: \[(.*)\]$", PAGES[DOCS / "reference" / "runner.md"], re.MULTILINE)
    assert listed
    described = {*listed[1].split(", "), *(name.removeprefix("Runner.") for name in DESCRIBED if name.startswith("Runner."))}
    assert described == {name for name in dir(percore.Runner) if not name.startswith("_")}


def test_each_environment_variable_has_its_row() -> None:
    read = {name for path in (ROOT / "src").rglob("*.py") for name in re.findall(r"\bPERCORE_[A-Z]+\b", path.read_text("utf-8"))}
    assert set(re.findall(r"^\| `(PERCORE_[A-Z]+)", PAGES[DOCS / "reference" / "environment.md"], re.MULTILINE)) == read
