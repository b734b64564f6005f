"""Port forwarding to a pod, like `kubectl port-forward`, over WebSockets through the API server. The official asyncio
client provides the WebSockets; this module implements the protocol's channels.
"""

import asyncio
import struct

import aiohttp

from bamboo_core.complaints import system_reason
from bamboo_core.kube.api import KubeApi
from bamboo_core.kube.errors import ApiError, RemoteError
from bamboo_core.text import printable

DATA, ERROR = 0, 1  # channels of the protocol v4.channel.k8s.io
CHUNK = 64 << 10


class PortForward:
    """A port of 127.0.0.1 that is forwarded to a pod's port. Each connection has its own WebSocket."""

    def __init__(self, api: KubeApi, namespace: str, pod: str, port: int) -> None:
        self._api, self._pod, self._port = api, (namespace, pod), port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._broken = asyncio.Event()

    async def open(self, port: int = 0) -> int:
        """Listen on 127.0.0.1 and return the port. port: 0 for any free one. Connects to the pod once first, so that
        errors show at once. Raises RemoteError.
        """
        async with self._api.port(*self._pod, self._port):
            pass
        try:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        except OSError as error:
            raise RemoteError(f"--port {port}: {system_reason(error)}") from None
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def broken(self) -> None:
        """Wait until a connection fails because the pod is gone (404)."""
        await self._broken.wait()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            async with self._api.port(*self._pod, self._port) as socket:
                await _join(reader, writer, socket, self._port)
        except ApiError as error:
            if error.status == 404:
                self._broken.set()
        except (RemoteError, OSError, aiohttp.ClientError):
            pass  # only this connection fails: the browser retries
        except asyncio.CancelledError:
            pass  # asyncio would print a traceback for a cancelled handler
        finally:
            self._connections.discard(task)
            writer.close()


async def _join(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, socket: aiohttp.ClientWebSocketResponse, port: int
) -> None:
    """Copy data both ways until either side ends. Raises RemoteError if the pod refuses the connection."""

    async def up() -> None:
        while data := await reader.read(CHUNK):
            await socket.send_bytes(bytes([DATA]) + data)

    async def down() -> None:
        greeted: set[int] = set()  # each channel begins with the port's number
        async for message in socket:
            if message.type is not aiohttp.WSMsgType.BINARY or not message.data:
                continue
            channel, data = message.data[0], message.data[1:]
            if channel not in greeted:
                greeted.add(channel)
                data = data[2:] if data[:2] == struct.pack("<H", port) else data
            if channel == ERROR and data:
                raise RemoteError(f"the pod refuses the connection: {printable(data.decode(errors='replace'))}")
            if channel == DATA and data:
                writer.write(data)
                await writer.drain()

    ways = [asyncio.create_task(up()), asyncio.create_task(down())]
    try:
        done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in done:
            way.result()  # raises its error
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
