"""The pages in docs/: each block of code runs, and prints what its page says."""

from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, blocks_of, name_of, pages, story_of
from tests.docs.story import Story

FILES = {"yaml", "toml", "ini", "dockerfile", "json", "html", "text"}
LANGUAGES = {"python", "pycon", "console", "diff", *FILES, "prelude", "skip", "story"}
RUN = ("python", "pycon", "console", "prelude")

PAGES = pages()
RUNNING = [page for page in PAGES if not story_of(page) and any(block.language in RUN for block in blocks_of(page))]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", RUNNING, ids=name_of)
def test_the_blocks_of_a_page_do_what_it_says(page: Path, tmp_path: Path) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    Story(page, folder).run()


def test_each_block_is_of_a_language_that_the_tests_know(subtests: pytest.Subtests) -> None:
    for page in PAGES:
        with subtests.test(page=name_of(page)):
            assert {block.language for block in blocks_of(page)} <= LANGUAGES


def test_a_page_with_a_story_of_its_own_names_a_test() -> None:
    for page in PAGES:
        story = story_of(page)
        assert story is None or (ROOT / story).is_file(), name_of(page)
