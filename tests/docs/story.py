"""Runs the blocks of one page in their order, in an empty folder."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from tests.docs.blocks import Block, blocks_of
from tests.docs.console import ANY, Command, commands_of, matches

SESSION = Path(__file__).with_name("session.py")
LIMIT = 100.0
"""Seconds that one command may take, or one block."""
_PORT = re.compile(r"(?:127\.0\.0\.1:|127\.0\.0\.1\", |localhost:|--port[ =]|http\.server )(\d{4,5})\b")
_INSTALL = re.compile(r"(?:python -m )?pip install (?P<names>.+)")


class Failed(AssertionError):
    """A block does not do what its page says."""


@dataclass
class Story:
    page: Path
    folder: Path
    _servers: list["Server"] = field(default_factory=list)
    _sessions: dict[str, "Session"] = field(default_factory=dict)
    _ports: dict[str, str] = field(default_factory=dict)
    _exports: str = ""
    """`env NAME=VALUE`, for the commands that follow `export NAME=VALUE`."""

    def run(self) -> None:
        blocks = blocks_of(self.page)
        self._ports = {port: str(free_port()) for block in blocks for port in _PORT.findall(block.text)}
        try:
            skipped = False
            for block, following in zip(blocks, [*blocks[1:], None], strict=True):
                if not skipped:
                    self._run(block, following)
                skipped = block.language == "skip"
            for session in self._sessions.values():
                session.end()
            for server in self._servers:
                server.end()
        finally:
            for session in self._sessions.values():
                session.kill()
            for server in self._servers:
                server.kill()

    def _run(self, block: Block, following: Block | None) -> None:
        if block.title is not None:
            path = self.folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._with_free_ports(block.text), encoding="utf-8")
        elif block.language == "console":
            for command in commands_of(self._with_free_ports(block.text)):
                self._command(block, command)
        elif block.language in ("python", "prelude", "pycon"):
            kind = "pycon" if block.language == "pycon" else "python"
            if kind not in self._sessions:
                self._sessions[kind] = Session(kind, self.folder)
            printed = self._sessions[kind].run(block, self._with_free_ports(block.text))
            expected = following.text.splitlines() if following is not None and following.language == "text" else []
            if block.language == "python" and not matches(expected, printed):
                raise Failed(f"{block}\nshould print:\n{_text(expected)}\nand printed:\n{printed}")

    def _with_free_ports(self, text: str) -> str:
        """Another program may use the ports that the page names."""
        return re.sub(r"(?<![\w.])\d{4,5}(?![\w.]*\w)", lambda found: self._ports.get(found[0], found[0]), text)

    def _command(self, block: Block, command: Command) -> None:
        if command.line.startswith("export "):
            self._exports = f"{self._exports or 'env '}{command.line.removeprefix('export ')} "
            return
        command.line = f"{self._exports}{command.line}"
        if installs := _INSTALL.fullmatch(command.line):
            check_installed(installs["names"])
        elif command.serves:
            server = Server(block, command, self.folder)
            self._servers.append(server)
            server.wait()
        else:
            run_command(block, command, self.folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def environment() -> dict[str, str]:
    """As in an activated environment, with plain output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PERCORE_", "COV_"))}
    folder = str(Path(sys.executable).parent)
    return {**kept, "PATH": f"{folder}:{kept.get('PATH', '')}", "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "100"}


def check_installed(names: str) -> None:
    """In place of an installation, which needs a network: the environment of the tests has the package."""
    for name in re.findall(r"(?<![\w-])[A-Za-z][\w.-]*", re.sub(r"\[[^]]*\]", "", names.replace("'", "").replace('"', ""))):
        metadata.distribution(name)


def run_command(block: Block, command: Command, folder: Path) -> None:
    process = _start(command.line, folder, subprocess.PIPE)
    try:
        output, _ = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        raise Failed(f"{block}: `{command.line}` did not end within {LIMIT:g} s") from None
    finally:
        _kill(process)
    if not matches(command.expected, output):
        raise Failed(f"{block}: `{command.line}`\nshould print:\n{_text(command.expected)}\nand printed:\n{output}")
    if process.returncode and not any(line.strip() not in ("", ANY) for line in command.expected):
        raise Failed(f"{block}: `{command.line}` ended with status {process.returncode}:\n{output}")


class Server:
    """A command that runs until the end of the page."""

    def __init__(self, block: Block, command: Command, folder: Path) -> None:
        self._about = f"{block}: `{command.line}`"
        self._expected = command.expected
        self._log = folder.parent / f"{folder.name}-server-{time.monotonic_ns()}.log"
        line = command.line.removesuffix("&").rstrip()
        port = next(iter(_PORT.findall(f"{line}\n{_text(command.expected)}")), None)
        if "percore.demo_server" in line and "--port" not in line:
            port = port or str(free_port())
            line = f"{line} --port {port}"
        if port is None:
            raise Failed(f"{self._about} names no port: write 127.0.0.1:8000, or --port 8000")
        self._port = int(port)
        with self._log.open("wb") as log:
            self._process = _start(line, folder, log)

    def wait(self) -> None:
        """Return when the server listens."""
        deadline = time.monotonic() + LIMIT
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1):
                return
            time.sleep(0.02)  # nothing tells when another program listens
        raise Failed(f"{self._about} does not answer on port {self._port}:\n{self._log.read_text()}")

    def end(self) -> None:
        """As Ctrl-C does."""
        if self._process.poll() is not None:
            raise Failed(f"{self._about} ended too early:\n{self._log.read_text()}")
        os.killpg(self._process.pid, signal.SIGINT)
        try:
            self._process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise Failed(f"{self._about} did not end after SIGINT:\n{self._log.read_text()}") from None
        output = self._log.read_text()
        if not matches(self._expected, output, start=True):
            raise Failed(f"{self._about}\nshould print:\n{_text(self._expected)}\nand printed:\n{output}")

    def kill(self) -> None:
        _kill(self._process)


class Session:
    """The program in which the untitled blocks run."""

    def __init__(self, kind: str, folder: Path) -> None:
        answers, told = os.pipe()
        source = f"exec(compile(open({str(SESSION)!r}).read(), 'session', 'exec'), dict(main=globals(), answers={told}))"
        self._answers = os.fdopen(answers)
        self._log = folder.parent / f"{folder.name}-{kind}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", source, kind],
                cwd=folder,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(told,),
                start_new_session=True,
                text=True,
            )
        os.close(told)

    def run(self, block: Block, text: str) -> str:
        """Run it, and return what it has printed."""
        assert self._process.stdin is not None
        message: dict[str, Any] = {"page": str(block.page), "line": block.line, "text": text}
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        answer = self._answers.readline()
        error, printed = json.loads(answer) if answer else ("the program ended", "")
        if error:
            raise Failed(f"{block}\n{error}\n{self._log.read_text()}")
        return str(printed)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        if status := self._process.wait(LIMIT):
            raise Failed(f"the program of the untitled blocks ended with status {status}:\n{self._log.read_text()}")

    def kill(self) -> None:
        _kill(self._process)
        self._answers.close()
        assert self._process.stdin is not None
        self._process.stdin.close()


def _start(line: str, folder: Path, output: int | IO[bytes]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        ["bash", "-c", f"exec {line}" if not re.search(r"[|;&]", line) else line],
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )


def _kill(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _text(lines: list[str]) -> str:
    return "\n".join(lines)
