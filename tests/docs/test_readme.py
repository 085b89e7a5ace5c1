"""The README's examples do what the README says, from an empty folder."""

import asyncio
import hashlib
import re
import sys
from pathlib import Path

from aiohttp import web

README = Path(__file__).parents[2] / "README.md"


EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


async def outcome_of(script: Path, *arguments: str) -> tuple[str, str, int | None]:
    """Standard output, standard error and the exit status of a script that runs in its own folder."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), *arguments, cwd=script.parent, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    return out.decode(), err.decode(), process.returncode


async def test_the_ten_lines_run_from_an_empty_folder(tmp_path: Path) -> None:
    script = tmp_path / "digests.py"
    script.write_text(EXAMPLES[0])
    digests = [hashlib.pbkdf2_hmac("sha256", b"salt", str(number).encode(), 100_000).hex()[:8] for number in range(4)]
    lines = [digests[1], str(digests), *digests]
    assert await outcome_of(script) == ("".join(f"{line}\n" for line in lines), "", 0)


async def test_the_example_with_a_session_runs_from_an_empty_folder(tmp_path: Path) -> None:
    script = tmp_path / "sizes.py"
    script.write_text(EXAMPLES[1])

    async def page(request: web.Request) -> web.Response:
        return web.Response(text="x" * int(request.match_info["size"]))

    server = web.AppRunner(_app(page))
    await server.setup()
    site = web.TCPSite(server, "127.0.0.1", 0)
    await site.start()
    try:
        port = server.addresses[0][1]
        urls = [f"http://127.0.0.1:{port}/{size}" for size in (3, 1, 2)]
        assert await outcome_of(script, *urls) == ("[3, 1, 2]\n", "", 0)
    finally:
        await server.cleanup()


def _app(page: object) -> web.Application:
    app = web.Application()
    app.router.add_get("/{size}", page)  # type: ignore[arg-type]
    return app
