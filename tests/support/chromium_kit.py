"""A headless Chromium, driven through the DevTools protocol, for tests and screenshots of the web page."""

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = f"needs Chromium ({', '.join(NAMES)}); on Debian: apt-get install chromium"
START_SECONDS = 120.0
ANSWER_SECONDS = 30.0
FLAGS = (
    "--headless=new",
    "--remote-debugging-port=0",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--disable-extensions",
    "--hide-scrollbars",
    "--mute-audio",
)


def chromium() -> str | None:
    """Return the path of this machine's Chromium, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


LEFT = ("Inspected target navigated or closed", "Execution context was destroyed", "Cannot find context")


class PageLeft(AssertionError):
    """Raised if the tab leaves the page during a call."""


class Tab:
    """One tab of the browser. errors: the page's errors and warnings. requests: the URLs that the page requested."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session: str | None = None
        self._context = ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loads: set[str] = set()  # loader IDs of the pages that have loaded
        self._loaded = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def open(self) -> None:
        self._context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        target = await self.call("Target.createTarget", url="about:blank", browserContextId=self._context)
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility", "DOM"):
            await self.call(f"{domain}.enable")
        await self.call("Page.setLifecycleEventsEnabled", enabled=True)

    async def leave(self) -> None:
        """Close the page and forget its cookies and storage."""
        self._session = None
        await self.call("Target.disposeBrowserContext", browserContextId=self._context)

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await self._socket.send_json(message)
                answer = await self._answers[number]
        finally:
            del self._answers[number]
        if "error" in answer:
            left = any(words in answer["error"]["message"] for words in LEFT)
            raise (PageLeft if left else AssertionError)(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer.get("result", {})
        return result

    async def _read(self) -> None:
        async for frame in self._socket:
            message = frame.json()
            if (number := message.get("id")) in self._answers:
                self._answers[number].set_result(message)
            else:
                self._notice(message.get("method", ""), message.get("params", {}))

    def _notice(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Page.lifecycleEvent" and parameters["name"] == "load":
            self._loads.add(parameters["loaderId"])
            self._loaded.set()
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.errors.append(str(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    async def size(self, width: int, height: int, *, phone: bool = False, scale: float = 1) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )

    async def media(self, **features: str) -> None:
        """Emulate media features, such as prefers_color_scheme="dark"."""
        chosen = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        await self.call("Emulation.setEmulatedMedia", features=chosen)

    async def goto(self, url: str) -> None:
        """Open a page and wait until it has loaded."""
        found = await self.call("Page.navigate", url=url)
        assert "errorText" not in found, found
        async with asyncio.timeout(ANSWER_SECONDS):
            while found["loaderId"] not in self._loads:  # the page before may load late
                self._loaded.clear()
                await self._loaded.wait()

    async def value(self, expression: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, f"{expression}: {found['exceptionDetails']}"
        return found["result"].get("value")

    async def until(self, expression: str, seconds: float = 30) -> Any:
        """Wait until a JavaScript expression is true, here or on a later page; return it. Raises AssertionError."""
        deadline = time.monotonic() + seconds
        while not (value := await self._value_if_here(expression)):
            if time.monotonic() > deadline:
                text = await self.value("document.body.innerText")
                raise AssertionError(f"{expression} was not true after {seconds} s; errors: {self.errors}\n{text}")
            await asyncio.sleep(0.1)
        return value

    async def _value_if_here(self, expression: str) -> Any:
        """Return the value of the expression; None while the tab leaves the page for another one."""
        try:
            return await self.value(expression)
        except PageLeft:
            return None

    async def text(self, selector: str) -> str:
        return str(await self.value(f"document.querySelector({selector!r}).innerText"))

    async def tree(self) -> list[tuple[str, str]]:
        """Return (role, name) of each node in the accessibility tree that screen readers do not ignore."""
        nodes = (await self.call("Accessibility.getFullAXTree"))["nodes"]
        return [
            (node.get("role", {}).get("value", ""), str(node.get("name", {}).get("value", "")))
            for node in nodes
            if not node.get("ignored")
        ]

    async def screenshot(self, path: Path, *, height: int | None = None) -> None:
        """Write the whole page, or its first `height` pixels, as a PNG."""
        box = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        clip = {
            "x": 0,
            "y": 0,
            "width": box["width"],
            "height": min(box["height"], height or box["height"]),
            "scale": 1,
        }
        found = await self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))


@contextlib.contextmanager
def started() -> Iterator[str]:
    """Run Chromium with a new profile; yield its DevTools address (ws://...). Raises AssertionError if that fails."""
    program = chromium()
    assert program is not None, MISSING
    with tempfile.TemporaryDirectory(prefix="bamboo-chromium-", ignore_cleanup_errors=True) as profile:
        flags = [*FLAGS, f"--user-data-dir={profile}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
        process = subprocess.Popen(
            [program, *flags, "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield _address(Path(profile), process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its processes are a group of their own
            process.wait()


@contextlib.asynccontextmanager
async def tab_of(address: str) -> AsyncIterator[Tab]:
    """Yield an empty tab of the browser at `address`. The tab shares no cookies and no storage with others."""
    async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:
        tab = Tab(socket)
        try:
            await tab.open()
            yield tab
            with contextlib.suppress(AssertionError, TimeoutError, ConnectionError):
                await tab.leave()
        finally:
            await tab.close()


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Tab]:
    """Start a browser for the block, and yield an empty tab of it."""
    with started() as address:
        async with tab_of(address) as tab:
            yield tab


def _address(profile: Path, process: "subprocess.Popen[bytes]") -> str:
    file = profile / "DevToolsActivePort"
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        lines = file.read_text().split("\n") if file.exists() else []
        if len(lines) > 1:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        time.sleep(0.05)
    raise AssertionError(f"Chromium did not start: exit code {process.returncode}")
