"""Workers in containers: stands in for bamboo.local.fork_server.ForkServer where a test drives a job."""

import asyncio
import contextlib
import secrets
import signal
from collections.abc import Callable
from pathlib import Path

from bamboo_core.names import ENV_COORDINATOR, ENV_TOKEN_FILE, ENV_WORKER
from image_kit import RUN_SECONDS, Store, call, confined

TOKEN_FOLDER = "/var/run/secrets/bamboo.dev"  # noqa: S105 - a path


class Containers:
    """on_exit: called in the loop with (worker, exit code), negative for a signal.

    shared: a file that workers see under the same path.
    """

    def __init__(
        self, store: Store, image: str, folder: Path, on_exit: Callable[[str, int | None], None], shared: Path
    ) -> None:
        self._store, self._image, self._folder, self._on_exit, self._shared = store, image, folder, on_exit, shared
        self._prefix = f"bamboo-test-{secrets.token_hex(4)}"
        self._running: dict[str, asyncio.Task[None]] = {}
        self._killing: list[asyncio.Task[None]] = []

    @property
    def alive(self) -> tuple[str, ...]:
        return tuple(self._running)

    async def open(self) -> None:
        """Nothing has to be there before the first container."""

    def start(self, worker: str, *, url: str, token: str, zone: str, main: str | None = None) -> None:
        assert not zone
        assert main is None
        secret = self._folder / f"{worker}-token"
        secret.mkdir()
        (secret / "token").write_text(token)
        environment = {ENV_WORKER: worker, ENV_COORDINATOR: url, ENV_TOKEN_FILE: f"{TOKEN_FOLDER}/token"}
        command = self._store.podman(
            "run",
            "--rm",
            "--name",
            f"{self._prefix}-{worker}",
            *confined(),
            *(item for name, value in environment.items() for item in ("--env", f"{name}={value}")),
            "--volume",
            f"{secret}:{TOKEN_FOLDER}:ro",
            "--volume",
            f"{self._shared}:{self._shared}:ro",
            self._image,
        )
        self._running[worker] = asyncio.create_task(self._run(worker, command))

    def signal(self, worker: str, number: int) -> None:
        name = signal.Signals(number).name
        self._killing.append(asyncio.create_task(self._call("kill", "--signal", name, f"{self._prefix}-{worker}")))

    async def close(self) -> None:
        """Removes what is left. Raises if a signal could not be sent."""
        for worker in self.alive:
            await self._call("rm", "--force", "--time", "0", "--ignore", f"{self._prefix}-{worker}")
        await asyncio.gather(*self._running.values(), *self._killing)

    def tail(self, lines: int = 15) -> str:
        """The last lines of each worker."""
        logs = sorted(self._folder.glob("*.log"))
        return "\n".join(f"{log.stem}: {line}" for log in logs for line in log.read_text().splitlines()[-lines:])

    async def _run(self, worker: str, command: list[str]) -> None:
        code = None
        try:
            with (self._folder / f"{worker}.log").open("wb") as log:
                process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
                try:
                    code = await process.wait()
                    code = 128 - code if code > 128 else code
                except asyncio.CancelledError:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                    await process.wait()
                    raise
        finally:
            del self._running[worker]
            self._on_exit(worker, code)

    async def _call(self, *arguments: str) -> None:
        await asyncio.to_thread(call, self._store.podman(*arguments), RUN_SECONDS)
