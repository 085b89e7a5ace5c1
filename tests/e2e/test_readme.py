"""The README's example does what the README says, from an empty folder."""

import asyncio
import re
import sys
from pathlib import Path

from aiohttp import web

README = Path(__file__).parents[2] / "README.md"


async def test_the_example_runs_from_an_empty_folder(tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    script = tmp_path / "sizes.py"
    script.write_text(code)

    async def page(request: web.Request) -> web.Response:
        return web.Response(text="x" * int(request.match_info["size"]))

    server = web.AppRunner(_app(page))
    await server.setup()
    site = web.TCPSite(server, "127.0.0.1", 0)
    await site.start()
    try:
        port = server.addresses[0][1]
        urls = [f"http://127.0.0.1:{port}/{size}" for size in (3, 1, 2)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(script), *urls, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await process.communicate()
    finally:
        await server.cleanup()
    assert (out.decode(), err.decode(), process.returncode) == ("[3, 1, 2]\n3\n1\n2\n", "", 0)


def _app(page: object) -> web.Application:
    app = web.Application()
    app.router.add_get("/{size}", page)  # type: ignore[arg-type]
    return app
