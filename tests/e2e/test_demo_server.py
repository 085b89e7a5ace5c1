"""`python -m percore.demo_server`: the server that the documentation's examples fetch from."""

import errno
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest

from percore.demo_server import answer_to

COMMAND = [sys.executable, "-m", "percore.demo_server"]


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a server, which is ended as by Ctrl-C while a connection is open."""
    with subprocess.Popen([*COMMAND, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        try:
            found = re.fullmatch(r"Serving on http://127\.0\.0\.1:(\d+)/ \(Ctrl-C ends it\)\n", server.stdout.readline())
            assert found
            port = int(found[1])
            with socket.create_connection(("127.0.0.1", port)):
                yield port
                server.send_signal(signal.SIGINT)
                assert (server.wait(30), server.stdout.read(), server.stderr.read()) == (0, "", "")
        finally:
            server.kill()


def test_one_connection_gets_its_answers_in_order(port: int) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as client:
        for method, path, body, status, size in (
            ("GET", "/bytes/100000?delay=0.01", None, 200, 100_000),
            ("HEAD", "/bytes/1000", None, 200, 0),
            ("POST", "/", b"ignored", 405, None),
            ("GET", "/status/204", None, 204, 0),
            ("GET", "/status/503", None, 503, None),
            ("GET", "/pages/100", None, 404, None),
            ("GET", "/a", None, 200, None),
        ):
            client.request(method, path, body)
            response = client.getresponse()
            content = response.read()
            assert response.status == status, path
            assert size is None or len(content) == size, path


def test_requests_that_come_at_once_are_answered_one_after_the_other(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET /first?delay=0.01 HTTP/1.1\r\n\r\nGET /second HTTP/1.0\r\n\r\nGET /never HTTP/1.1\r\n\r\n")
        received = b"".join(iter(lambda: client.recv(65_536), b"")).decode()
    assert re.findall("<h1>(.*)</h1>", received) == ["/first", "/second"]


def test_the_start_page_leads_to_every_page() -> None:
    waiting, seen = ["/"], {"/"}
    while waiting:
        answer = answer_to(waiting.pop())
        assert answer.status == 200
        new = set(re.findall('href="([^"]+)"', answer.body.decode())) - seen
        waiting += new
        seen |= new
    assert len(seen) == 101


def test_a_path_is_no_html() -> None:
    assert b"<b>" not in answer_to("/<b>").body


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        ended = subprocess.run([*COMMAND, "--port", str(number)], capture_output=True, text=True, check=False)
    said = f"cannot listen on 127.0.0.1:{number}: {os.strerror(errno.EADDRINUSE)}; choose another port with --port\n"
    assert (ended.returncode, ended.stderr) == (1, said)
