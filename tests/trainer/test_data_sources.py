"""Files of a dataset, here or in an object store, and a cache of blocks that survives other processes' changes."""

import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from bamboo_core.storage.bounded import StoreLimits, StoreUnavailable
from bamboo_trainer.data import CacheConfig, dataset_from, open_sources, sources
from bamboo_trainer.data.sources import SMALL_BLOCK, BlockCache, CachedFile, RemoteFiles
from bamboo_trainer.data.token_file import TokenWriter

QUICK = StoreLimits(seconds=30.0, tries=2, pause=0.0)


@pytest.fixture
def store():
    files = fsspec.filesystem("memory", skip_instance_cache=True)
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    yield files
    files.store.clear()


def put(store, name, data):
    store.pipe_file(f"/bucket/{name}", data)


def kept(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def opened(folder: Path, block: int = 100, size: int = 1 << 20) -> list[CachedFile]:
    remote, cache = RemoteFiles("memory://bucket", QUICK), BlockCache(folder, size, block)
    return [CachedFile(remote, entry, cache, block) for entry in remote.list()]


def test_any_part_of_a_file_is_what_is_in_the_store(store, tmp_path):
    data = bytes(range(256)) * 4
    put(store, "a", data)
    (file,) = opened(tmp_path)
    for start, end in [(0, 1024), (0, 0), (99, 101), (100, 200), (1000, 1024), (350, 820)]:
        assert bytes(file.read(start, end)) == data[start:end]
    assert file.content() == data


def test_what_is_kept_is_not_asked_for_again_not_even_by_another_process(store, tmp_path):
    put(store, "a", b"x" * 250)
    (file,) = opened(tmp_path)
    file.read(0, 250)
    version = opened(tmp_path)[0]
    store.store["/bucket/a"].seek(0)
    store.store["/bucket/a"].write(b"y" * 250)  # behind everybody's back
    assert bytes(version.read(0, 250)) == b"x" * 250


def test_a_file_that_was_written_anew_is_another_one(store, tmp_path):
    put(store, "a", b"x" * 250)
    opened(tmp_path)[0].read(0, 250)
    put(store, "a", b"y" * 250)
    assert bytes(opened(tmp_path)[0].read(0, 250)) == b"y" * 250


def test_a_damaged_or_torn_block_is_fetched_again(store, tmp_path):
    put(store, "a", b"x" * 250)
    opened(tmp_path)[0].read(0, 250)
    blocks = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".evicting"]
    assert len(blocks) == 3
    blocks[0].write_bytes(blocks[0].read_bytes()[:-1])
    blocks[1].write_bytes(b"")
    os.truncate(blocks[2], 7)
    assert bytes(opened(tmp_path)[0].read(0, 250)) == b"x" * 250
    assert bytes(opened(tmp_path)[0].read(0, 250)) == b"x" * 250


def test_the_folder_stays_within_its_size_and_keeps_what_was_used_last(store, tmp_path):
    cache = BlockCache(tmp_path, 20 * SMALL_BLOCK, SMALL_BLOCK)
    fetched: list[int] = []

    def fetch(number: int) -> bytes:
        fetched.append(number)
        return bytes([number]) * SMALL_BLOCK

    for number in range(60):
        cache.block("key", number, fetch)
        assert kept(tmp_path) <= 21 * SMALL_BLOCK
    fresh = BlockCache(tmp_path, 20 * SMALL_BLOCK, SMALL_BLOCK)
    fetched.clear()
    for number in range(50, 60):
        assert fresh.block("key", number, fetch) == bytes([number]) * SMALL_BLOCK
    assert len(fetched) < 10


def read_often(folder: Path, step: int) -> None:
    """Read blocks as one of several workers would, each time without blocks in memory."""
    for turn in range(120):
        data = bytes([turn * step % 40]) * SMALL_BLOCK
        cache = BlockCache(folder, 12 * SMALL_BLOCK, SMALL_BLOCK)
        assert cache.block("key", data[0], lambda number: bytes([number]) * SMALL_BLOCK) == data


def test_several_processes_share_a_folder(tmp_path):
    context = multiprocessing.get_context("fork")
    running = [context.Process(target=read_often, args=(tmp_path, step)) for step in (7, 11, 13)]
    for process in running:
        process.start()
    for process in running:
        process.join(200)
    assert [process.exitcode for process in running] == [0, 0, 0]
    BlockCache(tmp_path, 12 * SMALL_BLOCK, SMALL_BLOCK).block("last", 0, lambda _: b"x" * SMALL_BLOCK)
    assert kept(tmp_path) <= 13 * SMALL_BLOCK
    assert not [path for path in tmp_path.rglob(".*") if path.name != ".evicting"]


def test_what_a_killed_process_was_writing_is_removed_some_day(tmp_path):
    (tmp_path / "00").mkdir()
    left, writing = tmp_path / "00" / ".left", tmp_path / "00" / ".writing"
    for path in (left, writing):
        path.write_bytes(b"x")
    os.utime(left, (time.time() - 7200,) * 2)
    BlockCache(tmp_path, 1 << 20, 100).block("a", 0, lambda _: b"x")
    assert (left.exists(), writing.exists()) == (False, True)


def test_a_folder_that_cannot_be_written_to_costs_nothing_but_time(tmp_path, caplog):
    (tmp_path / "file").write_text("no folder")
    cache = BlockCache(tmp_path / "file" / "below", 1 << 20, 100)
    assert [cache.block("a", n, lambda number: bytes([number])) for n in (1, 2)] == [b"\1", b"\2"]
    assert len([r for r in caplog.records if "cannot be kept" in r.getMessage()]) == 1


def test_threads_may_read_at_once(store, tmp_path):
    data = os.urandom(10_000)
    put(store, "a", data)
    (file,) = opened(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        pieces = list(pool.map(lambda i: bytes(file.read(i, i + 500)), range(0, 9500, 7)))
    assert pieces == [data[i : i + 500] for i in range(0, 9500, 7)]


def test_a_store_that_fails_is_asked_again_and_then_told(store, tmp_path, monkeypatch):
    put(store, "a", b"x" * 250)
    (file,) = opened(tmp_path)
    failures = iter([ConnectionError("refused"), None])
    real = type(store).cat_file

    def sometimes(self, *arguments, **named):
        if (error := next(failures, ConnectionError("refused"))) is not None:
            raise error
        return real(self, *arguments, **named)

    monkeypatch.setattr(type(store), "cat_file", sometimes)
    assert bytes(file.read(0, 10)) == b"x" * 10
    with pytest.raises(StoreUnavailable, match=r"cannot read memory://bucket/a: .*refused.*, tried 2 times"):
        file.read(100, 110)


def test_a_file_that_has_become_shorter_is_told(store, tmp_path):
    put(store, "a", b"x" * 250)
    (file,) = opened(tmp_path)
    put(store, "a", b"x" * 120)
    with pytest.raises(StoreUnavailable, match=r"the store gave 20 of 100 bytes; has it been replaced\?"):
        file.read(100, 150)


def test_a_client_is_made_anew_after_a_fork(store, monkeypatch):
    made = []
    opening = sources.open_store
    monkeypatch.setattr(sources, "open_store", lambda url: made.append(url) or opening(url))
    remote = RemoteFiles("memory://bucket", QUICK)
    put(store, "a", b"x")
    remote.list()
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(writing, f"{remote.list()[0].name} {len(made)}".encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == "a 2"
    os.waitpid(pid, 0)


def test_tokens_in_a_store_are_a_dataset(store, tmp_path):
    threads = threading.active_count()
    for name, first in (("x/b.tokens", 100), ("x/a.tokens", 0), ("x/notes.txt", 0)):
        with store.open(f"/bucket/{name}", "wb") as file, TokenWriter(file, 300) as writer:
            writer.add(list(range(first, first + 9)))
            writer.end_document()
    config = {"kind": "tokens", "path": "memory://bucket/x", "length": 4, "cache": {"folder": str(tmp_path)}}
    (inputs,), _ = dataset_from(config).batch([0, 3])
    assert inputs.tolist() == [[0, 1, 2, 3], [104, 105, 106, 107]]
    one = open_sources("memory://bucket/x/b.tokens", (".tokens",))
    assert [file.name for file in one.files] == ["memory://bucket/x/b.tokens"]
    with pytest.raises(ValueError, match=r"^memory://bucket/x has no file of the kinds .jpg, .png"):
        open_sources("memory://bucket/x", (".jpg", ".png"))
    with pytest.raises(ValueError, match=r"^data: a cache of 1000 bytes, expected at least"):
        dataset_from({**config, "cache": {"gigabytes": 1e-6}})
    with pytest.raises(ValueError, match=r"^data: cache: unknown key 'size'"):
        dataset_from({**config, "cache": {"size": 1}})
    assert threading.active_count() < threads + 50


def test_the_default_folder_for_blocks_is_the_users_own(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("BAMBOO_DATA_CACHE", raising=False)
    (folder := CacheConfig().path).mkdir(mode=0o755)
    assert folder == tmp_path / f"bamboo-data-{os.geteuid()}"
    files = fsspec.filesystem("memory")
    files.pipe_file("/claimed/a.bin", b"x")
    open_sources("memory://claimed", (".bin",))
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="is not a folder of this user"):
        open_sources("memory://claimed", (".bin",))
    files.rm("/claimed", recursive=True)


def test_a_link_that_leads_back_is_not_followed(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.tokens").touch()
    (tmp_path / "a" / "back").symlink_to(tmp_path)
    (tmp_path / "b").symlink_to(tmp_path / "a")
    names = [source.name for source in open_sources(str(tmp_path), (".tokens",)).files]
    assert names == [f"{tmp_path}/a/x.tokens", f"{tmp_path}/b/x.tokens"]
