"""The dashboard as an application of aiohttp. A module of its own: the extra `web` works without aiohttp."""

from contextlib import aclosing, suppress

from aiohttp import web

from percore._web.dashboard import Pages, Request


def application(pages: Pages) -> web.Application:
    """Return an application for `add_subapp`, or for a server of its own."""

    async def handle(request: web.Request) -> web.StreamResponse:
        path = "/" + request.match_info.get("path", "")
        headers = {name.lower(): value for name, value in request.headers.items()}
        answer = await pages.answer(Request(request.method, path, headers))
        if isinstance(answer.body, bytes):
            return web.Response(status=answer.status, body=answer.body, headers=answer.headers())
        response = web.StreamResponse(status=answer.status, headers=answer.headers())
        with suppress(ConnectionResetError):  # nobody looks any more
            await response.prepare(request)
            async with aclosing(answer.body) as events:
                async for event in events:
                    await response.write(event.encode())
        return response

    found = web.Application()
    found.router.add_route("*", "", handle)
    found.router.add_route("*", "/{path:.*}", handle)
    return found
