"""Files of tokens, read in parts from a local path or an object store."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest

from bamboo_core.storage.bounded import StoreLimits, StoreUnavailable
from bamboo_trainer.data import dataset_from, open_sources, sources
from bamboo_trainer.data.sources import CachedFile, RemoteFiles
from bamboo_trainer.data.token_file import TokenWriter

QUICK = StoreLimits(seconds=30.0, tries=2, pause=0.0)


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(sources, "BLOCK", 100)
    files = fsspec.filesystem("memory", skip_instance_cache=True)
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    yield files
    files.store.clear()


def put(store, name, data):
    store.pipe_file(f"/bucket/{name}", data)


def opened() -> list[CachedFile]:
    remote = RemoteFiles("memory://bucket", QUICK)
    return [CachedFile(remote, entry) for entry in remote.list()]


def test_any_part_of_a_file_is_what_is_in_the_store(store):
    data = bytes(range(256)) * 4
    put(store, "a", data)
    (file,) = opened()
    for start, end in [(0, 1024), (0, 0), (1024, 1024), (99, 101), (100, 200), (50, 150), (1000, 1024), (350, 820)]:
        assert bytes(file.read(start, end)) == data[start:end]


def test_blocks_used_last_are_not_asked_for_again(store, monkeypatch):
    """The blocks used last stay in memory. A range longer than a block is read directly, and not kept."""
    asked = []
    real = type(store).cat_file

    def noted(self, path, start=None, end=None, **named):
        asked.append((path, start, end))
        return real(self, path, start=start, end=end, **named)

    monkeypatch.setattr(type(store), "cat_file", noted)
    monkeypatch.setattr(sources, "REMEMBERED", 300)
    put(store, "a", b"a" * 450)
    put(store, "b", b"b" * 450)
    a, b = opened()
    for file, start in [(a, 0), (a, 50), (b, 0), (a, 10), (b, 95)]:
        file.read(start, start + 20)
    assert asked == [("/bucket/a", 0, 100), ("/bucket/b", 0, 100), ("/bucket/b", 100, 200)]
    asked.clear()
    a.read(420, 440)
    b.read(0, 10)
    a.read(20, 321)
    assert asked == [("/bucket/a", 400, 450), ("/bucket/a", 20, 321)]
    a.read(0, 10)
    assert asked[2:] == [("/bucket/a", 0, 100)]


def test_threads_may_read_at_once(store):
    data = os.urandom(10_000)
    put(store, "a", data)
    (file,) = opened()
    with ThreadPoolExecutor(8) as pool:
        pieces = list(pool.map(lambda i: bytes(file.read(i, i + 500)), range(0, 9500, 7)))
    assert pieces == [data[i : i + 500] for i in range(0, 9500, 7)]


def test_a_store_that_fails_is_asked_again_and_then_told(store, monkeypatch):
    put(store, "a", b"x" * 250)
    (file,) = opened()
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


def test_a_file_that_has_become_shorter_is_told(store):
    put(store, "a", b"x" * 250)
    (file,) = opened()
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


def test_tokens_in_a_store_are_a_dataset(store):
    threads = threading.active_count()
    for name, first in (("x/b.tokens", 100), ("x/a.tokens", 0), ("x/notes.txt", 0)):
        with store.open(f"/bucket/{name}", "wb") as file, TokenWriter(file, 300) as writer:
            writer.add(list(range(first, first + 9)))
    config = {"kind": "tokens", "path": "memory://bucket/x", "length": 4}
    (inputs,), _ = dataset_from(config).batch([0, 3])
    assert inputs.tolist() == [[0, 1, 2, 3], [104, 105, 106, 107]]
    assert [file.name for file in open_sources("memory://bucket/x/b.tokens")] == ["memory://bucket/x/b.tokens"]
    store.pipe_file("/bucket/y/notes.txt", b"none")
    with pytest.raises(ValueError, match=r"^memory://bucket/y has no file \*\.tokens"):
        open_sources("memory://bucket/y")
    assert threading.active_count() < threads + 50


def test_a_link_that_leads_back_is_not_followed(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.tokens").touch()
    (tmp_path / "a" / "back").symlink_to(tmp_path)
    (tmp_path / "b").symlink_to(tmp_path / "a")
    names = [source.name for source in open_sources(str(tmp_path))]
    assert names == [f"{tmp_path}/a/x.tokens", f"{tmp_path}/b/x.tokens"]
    (tmp_path / "a" / "y.tokens").symlink_to("gone")
    with pytest.raises(ValueError, match=f"^cannot read {tmp_path}/a/y.tokens: No such file"):
        open_sources(str(tmp_path))
