"""A local HTTP server: `server.py SECONDS BYTES` answers after this time with this many bytes, and prints its URL.

It ends with its standard input.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop
from aiohttp import web


async def main(seconds: float, size: int) -> None:
    body = b"x" * size

    async def answer(_request: web.BaseRequest) -> web.Response:
        await asyncio.sleep(seconds)
        return web.Response(body=body)

    loop = asyncio.get_running_loop()
    protocols = web.Server(answer)
    server = await loop.create_server(protocols, "127.0.0.1", 0)
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/", flush=True)
    await ended.wait()
    server.close()
    await protocols.shutdown(timeout=0.1)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(float(sys.argv[1]), int(sys.argv[2])))
