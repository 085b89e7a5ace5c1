"""The page of a runner: its format, and what becomes of it in a fork."""

import json
import os
import zlib

import pytest

from percore._common.system import HAS_MEMFD
from percore._monitor.page import MAGIC, NoPage, PageFile, decode, encode


def body(functions: int) -> dict[str, object]:
    statistics = {"functions": [{"name": "f" * 1000} for _ in range(functions)]}
    return {"pid": 1, "number": 1, "program": "crawl.py", "statistics": statistics}


def test_a_page_is_read_as_it_was_written() -> None:
    assert decode(encode(body(3))) == body(3)


def test_a_page_that_is_too_large_shows_the_first_functions() -> None:
    data = encode(body(3000))
    assert len(data) < 1 << 21
    assert 0 < len(decode(data)["statistics"]["functions"]) < 3000


def test_half_a_write_is_no_page() -> None:
    old, new = encode(body(1)), encode({**body(1), "pid": 2})
    assert len(old) == len(new)
    for cut in range(1, len(old)):
        torn = new[:cut] + old[cut:]
        if torn not in {old, new}:
            with pytest.raises(NoPage):
                decode(torn)
    for cut in range(len(old)):
        with pytest.raises(NoPage):
            decode(old[:cut])


def test_v10_what_another_program_has_written_in_place_of_a_page_is_none(subtests: pytest.Subtests) -> None:
    wrong: list[dict[str, object]] = [{**body(0), name: []} for name in body(0)]
    wrong += [{name: value for name, value in body(0).items() if name != left_out} for left_out in body(0)]
    for found in wrong:
        with subtests.test(str(found)), pytest.raises(NoPage):
            decode(_page(json.dumps(found)))
    for text in ("[" * 200_000, '{"pid": ', "7", '"', "\ud800"):
        with subtests.test(ascii(text[:10])), pytest.raises(NoPage):
            decode(_page(text))


def _page(text: str) -> bytes:
    """A page with this in place of its object."""
    data = text.encode(errors="surrogatepass")
    return MAGIC + len(data).to_bytes(4, "little") + zlib.crc32(data).to_bytes(4, "little") + data


def test_what_is_left_of_a_longer_page_does_not_count() -> None:
    assert decode(encode(body(1)) + b"the end of a longer page") == body(1)


@pytest.mark.skipif(not HAS_MEMFD, reason="pages are memfds")
def test_a_page_ends_with_its_descriptor_and_in_forks() -> None:
    page = PageFile()
    page.write(b"written")
    fd = page._fd
    pid = os.fork()
    if not pid:
        try:
            os.fstat(fd)
        except OSError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert os.pread(fd, 7, 0) == b"written"
    page.close()
    page.close()
    page.write(b"nobody reads this")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
