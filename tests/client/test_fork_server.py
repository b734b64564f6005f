"""The fork server: start, signals, calls and ends of worker processes."""

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bamboo.local.fork_server import ForkServer, ForkServerError
from cluster.children import is_alive
from folders import TASK_PATH
from waiting import in_time

SECONDS = 60.0  # the longest wait of a test
LONG = 600.0


def sleep_worker(worker: str, url: str, token: str, zone: str, trace: str | None) -> int:
    time.sleep(float(url))
    return int(token)


KINDS = ("child", "session", "forked", "deaf", "orphan")


def starting_worker(worker: str, url: str, token: str, zone: str, trace: str | None) -> int:
    """Start a long-lived process in each way of KINDS, and end after `token` seconds. url: a folder for their pids."""
    note = "import os, sys; open(sys.argv[1] + '/' + sys.argv[2], 'x').write(str(os.getpid())); "
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    wait = f"import time; time.sleep({LONG})"

    def command(kind: str, before: str = "") -> list[str]:
        return [sys.executable, "-c", before + note + wait, url, kind]

    subprocess.Popen(command("child"))
    subprocess.Popen(command("session"), start_new_session=True)
    subprocess.Popen(command("deaf", deaf), start_new_session=True)
    if os.fork() == 0:
        os.execv(sys.executable, command("forked"))
    if (between := os.fork()) == 0:  # its child is nobody's
        subprocess.Popen(command("orphan"), start_new_session=True)
        os._exit(0)
    os.waitpid(between, 0)
    time.sleep(float(token))
    return 0


def echo(text: str) -> str:
    return text


def fail(text: str) -> None:
    raise ValueError(text)


def crash() -> None:
    ctypes.string_at(0)


def crashing_worker(**_: str | None) -> int:
    crash()
    return 0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this module importable in the launcher."""
    monkeypatch.setenv("PYTHONPATH", TASK_PATH)


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """Record the launcher processes that a test starts, and return their list."""
    started: list[Process] = []
    start_process = asyncio.create_subprocess_exec

    async def noted(*words: Any, **settings: Any) -> Process:
        started.append(await start_process(*words, **settings))
        return started[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", noted)
    return started


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[tuple[ForkServer, asyncio.Queue[tuple[str, int | None]]]]:
    exits: asyncio.Queue[tuple[str, int | None]] = asyncio.Queue()
    pool = ForkServer(lambda worker, code: exits.put_nowait((worker, code)), tmp_path / "log", imports=[__name__])
    await pool.open("--bare")
    yield pool, exits
    await pool.close()


def start(pool: ForkServer, worker: str, seconds: float, code: int = 0) -> None:
    main = f"{__name__}:sleep_worker"
    pool.start(worker, url=str(seconds), token=str(code), zone="", trace=None, main=main)


async def test_exits_are_told_at_once_with_their_codes(pool: Any) -> None:
    pool, exits = pool
    start(pool, "w0", LONG)
    start(pool, "w1", 0, code=3)
    assert await asyncio.wait_for(exits.get(), SECONDS) == ("w1", 3)
    await in_time(lambda: pool.pid("w0"))
    pool.signal("w0", signal.SIGKILL)  # from here on nothing but its end wakes the launcher
    assert await asyncio.wait_for(exits.get(), SECONDS) == ("w0", -signal.SIGKILL)
    assert pool.alive == ()
    pool.signal("w0", signal.SIGKILL)  # no complaint


async def test_a_signal_reaches_a_worker_that_is_being_started(pool: Any) -> None:
    pool, exits = pool
    start(pool, "w0", LONG)
    pool.signal("w0", signal.SIGTERM)
    assert await asyncio.wait_for(exits.get(), SECONDS) == ("w0", -signal.SIGTERM)
    start(pool, "w1", LONG)
    pool.signal("w1", signal.SIGKILL)
    pool.signal("w1", signal.SIGTERM)
    assert await asyncio.wait_for(exits.get(), SECONDS) == ("w1", -signal.SIGKILL)


async def test_a_call_returns_its_value_or_its_error(pool: Any) -> None:
    pool, _ = pool
    long = "x" * 1_000_000
    results = await asyncio.gather(*(pool.call(f"{__name__}:echo", {"text": text}) for text in ("a", long, "b")))
    assert results == ["a", long, "b"]
    with pytest.raises(ForkServerError, match="ValueError: no good"):
        await pool.call(f"{__name__}:fail", {"text": "no good"})
    with pytest.raises(ForkServerError, match="ended without an answer"):
        await pool.call(f"{__name__}:die", {})
    with pytest.raises(ForkServerError, match="no_such"):
        await pool.call(f"{__name__}:no_such", {})


async def test_the_log_says_in_which_line_a_process_crashed(pool: Any, tmp_path: Path) -> None:
    pool, exits = pool
    line = crash.__code__.co_firstlineno + 1
    pool.start("w7", url="", token="", zone="", trace=None, main=f"{__name__}:crashing_worker")
    assert await asyncio.wait_for(exits.get(), SECONDS) == ("w7", -signal.SIGSEGV)
    said = pool.tail(50)
    assert "Fatal Python error: Segmentation fault" in said
    assert f"line {line} in crash" in said
    assert "in crashing_worker" in said
    with pytest.raises(ForkServerError, match="ended without an answer, with code -11"):
        await pool.call(f"{__name__}:crash", {})


async def test_modules_are_found_in_the_folders_in_their_order_and_replace_no_others(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / "taskmodule.py").write_text(f"def where():\n    return {folder.name!r}\n")
        (folder / "selectors.py").write_text("raise ValueError('the launcher needs the other one')\n")
    (second / "othermodule.py").write_text("def where():\n    return 'second'\n")
    pool = ForkServer(lambda worker, code: None, tmp_path / "log", folders=[first, second])
    await pool.open("--bare")
    try:
        assert [await pool.call(f"{name}:where", {}) for name in ("taskmodule", "othermodule")] == ["first", "second"]
        with pytest.raises(ForkServerError, match="no_such"):
            await pool.call("no_such:where", {})
    finally:
        await pool.close()


async def started_by_worker(pool: ForkServer, folder: Path, seconds: float) -> dict[str, int]:
    """Start a worker that ends after `seconds`. Return its pid and those of all processes that it starts, by name."""
    folder.mkdir()
    main = f"{__name__}:starting_worker"
    pool.start("w0", url=str(folder), token=str(seconds), zone="", trace=None, main=main)
    files = [folder / kind for kind in KINDS]
    await in_time(lambda: pool.pid("w0") and all(file.is_file() and file.read_text() for file in files))
    return {"w0": pool.pid("w0") or 0, **{file.name: int(file.read_text()) for file in files}}


@pytest.mark.parametrize("end", ["killed", "by itself"])
async def test_what_a_worker_has_started_ends_with_it(pool: Any, tmp_path: Path, end: str) -> None:
    pool, exits = pool
    pids = await started_by_worker(pool, tmp_path / "pids", LONG if end == "killed" else 3.0)
    start(pool, "w1", LONG)
    if end == "killed":
        assert all(map(is_alive, pids.values())), "also the one that is nobody's lives as long as the worker"
        pool.signal("w0", signal.SIGKILL)
    assert (await exits.get())[0] == "w0"
    await in_time(lambda: not any(map(is_alive, pids.values())))
    assert is_alive(pool.pid("w1") or 0)


@pytest.mark.parametrize("end", ["close", "SIGTERM", "SIGKILL"])
async def test_what_workers_have_started_ends_with_their_launcher(
    tmp_path: Path, launchers: list[Process], end: str
) -> None:
    exits: list[str] = []
    pool = ForkServer(lambda worker, code: exits.append(worker), tmp_path / "log", imports=[__name__])
    await pool.open("--bare")
    pids = await started_by_worker(pool, tmp_path / "pids", LONG)
    pool.signal("w0", signal.SIGSTOP)
    if end != "close":
        launchers[0].send_signal(getattr(signal, end))
    await pool.close()
    assert exits == ["w0"]
    assert not any(map(is_alive, pids.values()))
    with pytest.raises(ForkServerError, match="has ended"):
        start(pool, "w9", 0)


async def test_a_worker_that_cannot_be_imported_says_so(pool: Any) -> None:
    pool, exits = pool
    pool.start("w0", url="", token="", zone="", trace=None, main="no_such:main")
    assert await asyncio.wait_for(exits.get(), SECONDS) == ("w0", 1)
    assert "No module named 'no_such'" in pool.tail()


async def test_a_launcher_that_is_still_importing_is_closed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launchers: list[Process]
) -> None:
    monkeypatch.setattr("bamboo.local.fork_server.CLOSE_SECONDS", SECONDS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "takes_long.py").write_text(f"import time\nprint('importing', flush=True)\ntime.sleep({LONG})\n")
    pool = ForkServer(lambda worker, code: None, tmp_path / "log", imports=["takes_long"])
    opening = asyncio.create_task(pool.open("--bare"))
    await in_time(lambda: "importing" in pool.tail())
    pid = launchers[0].pid
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    begun = time.monotonic()
    await pool.close()
    assert time.monotonic() - begun < SECONDS / 2
    assert not is_alive(pid)


async def test_a_launcher_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bamboo.local.fork_server.LAUNCHER", "no_such_launcher")
    pool = ForkServer(lambda worker, code: None, tmp_path / "log")
    with pytest.raises(
        ForkServerError, match=r"did not start: it exited with code 1: .*No module named no_such_launcher"
    ):
        await pool.open()


def asking_worker(*, worker: str, gate: int, steps: list[int], **_: str | None) -> int:
    """Ask the launcher once for each step, wait for each answer, and return the number of answers."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    for step in steps:
        os.write(gate, json.dumps([worker, step]).encode() + b"\n")
        assert signal.sigtimedwait({signal.SIGUSR1}, SECONDS)
    return len(steps)


async def test_the_pool_hears_the_question_and_the_worker_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", TASK_PATH)
    asked: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
    ended: asyncio.Queue[tuple[str, int | None]] = asyncio.Queue()
    pool = ForkServer(
        lambda worker, code: ended.put_nowait((worker, code)),
        tmp_path / "log",
        on_ask=lambda worker, step: asked.put_nowait((worker, step)),
    )
    await pool.open("--bare")
    try:
        for worker in ("w0", "w1"):
            pool.start(worker, (3, 7), url="", token="", zone="", main=f"{__name__}:asking_worker")
        async with asyncio.timeout(SECONDS):
            assert {await asked.get() for _ in range(2)} == {("w0", 3), ("w1", 3)}
            pool.proceed("w1")
            assert await asked.get() == ("w1", 7)
            pool.proceed("w1")
            assert await ended.get() == ("w1", 2)
            pool.signal("w0", 9)  # it never began what it asked for
            pool.proceed("w0")
            assert await ended.get() == ("w0", -9)
    finally:
        await pool.close()
    pool.proceed("w0")  # no complaint
