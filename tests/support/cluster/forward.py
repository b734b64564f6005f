"""A kubelet's port forwarding over a WebSocket (v4.channel.k8s.io), for one connection to one port of a pod."""

import asyncio
import struct

from aiohttp import WSMsgType, web

PROTOCOL = "v4.channel.k8s.io"
DATA, ERROR = b"\0", b"\1"
CHUNK = 64 << 10


async def serve(request: web.Request, address: str, port: int) -> web.WebSocketResponse:
    socket = web.WebSocketResponse(protocols=[PROTOCOL])
    await socket.prepare(request)
    for channel in (DATA, ERROR):
        await socket.send_bytes(channel + struct.pack("<H", port))
    try:
        reader, writer = await asyncio.open_connection(address, port)
    except OSError as error:
        await socket.send_bytes(ERROR + f"connection to port {port} failed: {error.strerror}".encode())
        await socket.close()
        return socket
    down = asyncio.create_task(_down(reader, socket))
    try:
        async for message in socket:
            if message.type is WSMsgType.BINARY and message.data[:1] == DATA:
                writer.write(message.data[1:])
                await writer.drain()
    finally:
        down.cancel()
        await asyncio.gather(down, return_exceptions=True)
        writer.close()
    return socket


async def _down(reader: asyncio.StreamReader, socket: web.WebSocketResponse) -> None:
    while data := await reader.read(CHUNK):
        await socket.send_bytes(DATA + data)
    await socket.close()
