"""The README's examples do what the README says, in the order that the README has."""

from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.docs.story import Story

README = ROOT / "README.md"


@pytest.mark.timeout(300)
def test_the_blocks_of_the_readme_do_what_it_says(tmp_path: Path) -> None:
    folder = tmp_path / "readme"
    folder.mkdir()
    Story(README, folder).run()


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) < 120
