"""A headless Chromium, steered by the DevTools protocol."""

import asyncio
import base64
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"),
    *("--remote-debugging-port=0", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
)

SCRIPTS = Path(__file__).parent


class Tab:
    """One page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, session: str) -> None:
        self._socket = socket
        self._session = session
        self._ids = count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.messages: list[str] = []
        """What the console and the log have said."""

    async def read(self) -> None:
        """Take what the browser says, until it ends."""
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._answers.pop(said["id"]).set_result(said)
            elif said["method"] in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                self.messages.append(json.dumps(said["params"]))

    async def call(self, method: str, **parameters: object) -> dict[str, Any]:
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        request = {"id": number, "method": method, "params": parameters}
        await self._socket.send_json(request | ({"sessionId": self._session} if self._session else {}))
        said = await answer
        assert "error" not in said, said
        result: dict[str, Any] = said["result"]
        return result

    async def attach(self) -> None:
        """Make a tab, and use it from now on."""
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        self._session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        for room in ("Page", "Runtime", "Log"):
            await self.call(f"{room}.enable")
        await self.call("Page.addScriptToEvaluateOnNewDocument", source=(SCRIPTS / "shifts.js").read_text())

    async def open(self, url: str, width: int, height: int = 900, *, dark: bool = False) -> None:
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url=url)

    async def value(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        said = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until the expression is true, asking once in each frame that the page shows."""
        ask = f"const ask = () => {{ const it = ({expression}); it ? done(it) : setTimeout(ask, 20); }};"
        return await self.value(f"new Promise(done => {{ {ask} ask(); }})")

    async def contrast(self) -> tuple[float, str]:
        """The lowest contrast of a visible text with what is behind it, by WCAG's formula, and that text."""
        ratio, text = await self.value((SCRIPTS / "contrast.js").read_text())
        return ratio, text

    async def press(self, key: str, code: int, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, text=text)

    async def picture(self) -> bytes:
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])


@asynccontextmanager
async def browsing() -> AsyncIterator[Tab]:
    """Run a browser, and yield a tab. It is gone at the end, with its profile."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="percore-browser-", ignore_cleanup_errors=True) as profile:
        command = (CHROMIUM, *OPTIONS, f"--user-data-dir={profile}", "about:blank")
        pipe = asyncio.subprocess.PIPE
        browser = await asyncio.create_subprocess_exec(
            *command, stderr=pipe, stdout=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        try:
            assert browser.stderr is not None
            async for line in browser.stderr:
                if b"DevTools listening on " in line:
                    address = line.decode().partition("listening on ")[2].strip()
                    break
            else:
                pytest.skip("Chromium does not start here")
            drained = asyncio.create_task(browser.stderr.read())
            async with aiohttp.ClientSession() as http, http.ws_connect(address, max_msg_size=0) as socket:
                tab = Tab(socket, "")
                reads = asyncio.create_task(tab.read())
                await tab.attach()
                yield tab
                tab._session = ""
                await tab.call("Browser.close")
                await reads
            await drained
        finally:
            with suppress(ProcessLookupError):
                browser.kill()
            await browser.wait()
