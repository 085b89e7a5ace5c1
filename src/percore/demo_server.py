"""A small web server for trying percore out.

    python -m percore.demo_server              # on http://127.0.0.1:8000/, until Ctrl-C
    python -m percore.demo_server --port 8080 --delay 0.05

The examples of the documentation fetch their pages from it. It listens on 127.0.0.1 alone, needs only the standard library, and
answers GET and HEAD:

    /               a page with links to /pages/0 ... /pages/99
    /pages/7        a page with a title, some text, and links to three other pages
    /bytes/1000     1,000 bytes
    /status/503     an answer with this status
    /anything       a short page with this path as its title

Each answer comes at once, or after `--delay` seconds. With `?delay=0.5` one answer comes after half a second.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from html import escape
from http import HTTPStatus
from typing import Final, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

HOST: Final = "127.0.0.1"
PAGES: Final = 100
_MOST_BYTES: Final = 100_000_000
_LONGEST_HEAD: Final = 65_536
_LONGEST_DELAY: Final = 60.0


class Answer(NamedTuple):
    """The answer to one request."""

    status: int
    body: bytes
    kind: str = "text/html; charset=utf-8"

    def encoded(self, *, head_only: bool, last: bool) -> bytes:
        """Return the bytes to send. The answer to a HEAD request has no body. The last answer says that the connection closes."""
        lines = [
            f"HTTP/1.1 {self.status} {_phrase(self.status)}",
            f"Content-Type: {self.kind}",
            f"Content-Length: {len(self.body)}",
            *(["Connection: close"] if last else []),
        ]
        head = "".join(f"{line}\r\n" for line in lines) + "\r\n"
        return head.encode("latin-1") + (b"" if head_only else self.body)


def answer_to(path: str) -> Answer:
    """Return the answer to a request for this path, which has no query."""
    folder, _, name = path.strip("/").rpartition("/")
    number = int(name) if name.isascii() and name.isdigit() and len(name) < 10 else -1
    if folder == "bytes" and 0 <= number <= _MOST_BYTES:
        return Answer(200, b"x" * number, "application/octet-stream")
    if folder == "status" and 200 <= number <= 599:
        return Answer(number, b"" if number in (204, 304) else _html(f"Status {number}", _phrase(number)))
    if folder == "pages":
        return _page(number) if 0 <= number < PAGES else Answer(404, _html("Not found", f"The pages are 0 to {PAGES - 1}."))
    if not path.strip("/"):
        return Answer(200, _html("Pages", _links(range(PAGES))))
    return Answer(200, _html(path, f"This is {escape(path)}."))


def _page(number: int) -> Answer:
    text = "".join(f"<p>Line {line} of page {number}.</p>\n" for line in range(100 + number))
    others = [(number * factor + 1) % PAGES for factor in (1, 3, 7)]
    return Answer(200, _html(f"Page {number}", text + _links(others)))


def _html(title: str, content: str) -> bytes:
    title = escape(title)
    return f"<!doctype html>\n<title>{title}</title>\n<h1>{title}</h1>\n{content}\n".encode()


def _links(numbers: Sequence[int]) -> str:
    return "\n".join(f'<a href="/pages/{number}">Page {number}</a>' for number in numbers)


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Status"


_NOT_ALLOWED: Final = Answer(405, _html("Not allowed", "This server answers GET and HEAD."))


class _Connection(asyncio.Protocol):
    """Answers the requests of one connection, one after the other."""

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._received = bytearray()
        self._to_skip = 0  # bytes of a request's body
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, _error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._go_on()

    def _go_on(self) -> None:
        while self._timer is None and not self._transport.is_closing():
            skipped = min(self._to_skip, len(self._received))
            self._to_skip -= skipped
            del self._received[:skipped]
            end = self._received.find(b"\r\n\r\n")
            if end < 0:
                if len(self._received) > _LONGEST_HEAD:
                    self._transport.abort()
                return
            head = self._received[:end].decode("latin-1")
            del self._received[: end + 4]
            self._take(head)

    def _take(self, head: str) -> None:
        first, *lines = head.split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        method, _, rest = first.partition(" ")
        target, _, version = rest.partition(" ")
        length = headers.get("content-length", "0")
        self._to_skip = int(length) if length.isdigit() else 0
        last = version != "HTTP/1.1" or headers.get("connection", "").lower() == "close"
        if method not in ("GET", "HEAD"):
            self._send(_NOT_ALLOWED.encoded(head_only=False, last=last), last)
            return
        path, query = urlsplit(target)[2:4]
        answer = answer_to(unquote(path)).encoded(head_only=method == "HEAD", last=last)
        if delay := _delay_of(query, self._delay):
            self._timer = asyncio.get_running_loop().call_later(delay, self._send, answer, last)
        else:
            self._send(answer, last)

    def _send(self, answer: bytes, last: bool) -> None:
        self._transport.write(answer)
        if last:
            self._transport.close()
        if self._timer is not None:
            self._timer = None
            self._go_on()


def _delay_of(query: str, default: float) -> float:
    try:
        return min(_LONGEST_DELAY, max(0.0, float(parse_qs(query)["delay"][0])))
    except (KeyError, ValueError):
        return default


async def serve(port: int, delay: float) -> None:
    """Serve on 127.0.0.1 until cancelled, and print the address."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(delay), HOST, port)
    address = server.sockets[0].getsockname()
    print(f"Serving on http://{address[0]}:{address[1]}/ (Ctrl-C ends it)", flush=True)
    try:
        await loop.create_future()
    finally:
        server.close()


def main() -> None:
    """Run the server as a program."""
    parser = argparse.ArgumentParser(
        prog="python -m percore.demo_server", description="A small web server on 127.0.0.1 for trying percore out. Ctrl-C ends it."
    )
    parser.add_argument("--port", type=int, default=8000, help="the port to listen on; 0 chooses a free one (default: %(default)s)")
    parser.add_argument("--delay", type=float, default=0.0, metavar="SECONDS", help="how long each answer takes (default: none)")
    arguments = parser.parse_args()
    if not 0 <= arguments.port <= 65_535:
        parser.error(f"--port is a number from 0 to 65535, not {arguments.port}")
    try:
        asyncio.run(serve(arguments.port, arguments.delay))
    except KeyboardInterrupt:
        pass
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        sys.exit(f"cannot listen on {HOST}:{arguments.port}: {reason}; choose another port with --port")


if __name__ == "__main__":
    main()
