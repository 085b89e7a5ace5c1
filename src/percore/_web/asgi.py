"""The dashboard as an ASGI application."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import aclosing
from typing import Any, TypeAlias

from percore._web.dashboard import Pages, Request

Message: TypeAlias = MutableMapping[str, Any]
Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]


async def respond(pages: Pages, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer one request."""
    root, path = scope.get("root_path", ""), scope["path"]
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
    answer = await pages.answer(Request(scope["method"], path.removeprefix(root), headers))
    encoded = [(name.lower().encode(), value.encode()) for name, value in answer.headers().items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": encoded})
    if isinstance(answer.body, bytes):
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else answer.body})
        return
    events = asyncio.create_task(_send_events(answer.body, send))
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((events, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        events.cancel()
        await asyncio.wait((events, gone))
    if not events.cancelled():
        events.result()


async def _send_events(events: AsyncGenerator[str, None], send: Send) -> None:
    async with aclosing(events):
        async for event in events:
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
