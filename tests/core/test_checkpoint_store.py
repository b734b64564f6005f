"""The checkpoint store in a folder and in an object store: write, commit, list, read, remove."""

import os
from pathlib import Path

import msgspec
import pytest

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.checkpoint.manifest import CheckpointDamaged, CheckpointExists
from bamboo_core.checkpoint.selection import ListedState
from bamboo_core.checkpoint.store import CheckpointStore
from bamboo_core.storage.bounded import StoreUnavailable
from bamboo_core.storage.local_files import LocalFiles
from bamboo_core.storage.object_store import ObjectFiles
from checkpoint_kit import IMPATIENT, FaultyFileSystem, faulty_store, layer_bytes, make_manifest, save


@pytest.fixture(params=["folder", "objects"])
def place(request, tmp_path):
    """Return a checkpoint store in a folder or in an object store, and direct access to its files."""
    if request.param == "folder":
        return CheckpointStore(str(tmp_path / "a" / "run"), IMPATIENT), LocalFiles(str(tmp_path / "a" / "run"))
    filesystem = FaultyFileSystem()
    return faulty_store(filesystem), ObjectFiles(filesystem, "/run")


def listed(store):
    return [(one.attempt.step, one.state.value) for one in store.list()]


def test_what_is_committed_is_listed_and_read(place):
    store, _ = place
    assert store.list() == ()
    store.probe()
    manifests = [save(store, step, layers=3) for step in (20, 100, 40)]
    found = store.list()
    assert [one.manifest for one in found] == [manifests[1], manifests[2], manifests[0]]
    assert all(one.state is ListedState.COMPLETE and one.bytes > one.manifest.bytes for one in found)
    assert all(one.modified is not None and one.modified > 1e9 for one in found)
    for manifest in manifests:
        for layer in range(3):
            assert store.read_part(manifest, layer) == layer_bytes(manifest.step, layer)
            assert store.read_start(manifest, layer, 7) == layer_bytes(manifest.step, layer)[:7]
        assert [problem for _, problem in store.verify(manifest)] == ["", "", ""]
    for one in found[:2]:
        store.delete(one.attempt)
        store.delete(one.attempt)
    assert listed(store) == [(20, "Complete")]


def test_a_commit_may_be_repeated_but_not_changed(place):
    store, _ = place
    manifest = save(store, 20)
    store.commit(manifest)
    with pytest.raises(CheckpointExists, match=r"step-000000020-.*/manifest.json is there, with other contents"):
        store.commit(msgspec.structs.replace(manifest, seed=4))
    assert store.list()[0].manifest == manifest
    other = save(store, 20)  # of the same step, by somebody else
    assert {one.manifest.attempt for one in store.list()} == {manifest.attempt, other.attempt}


def test_nothing_is_committed_whose_files_are_not_there(place):
    store, files = place
    attempt = CheckpointId(20, "a")
    parts = [store.write_part(attempt, layer, [layer_bytes(20, layer)]) for layer in range(2)]
    files.delete(attempt.part(1))
    for change in (lambda: None, lambda: files.write(attempt.part(1), [b"half"])):
        change()
        with pytest.raises(CheckpointDamaged, match=r"cannot be committed: layer-00001.safetensors (is missing|has 4)"):
            store.commit(make_manifest(attempt, parts))
        assert listed(store) == [(20, "Unfinished")]


def test_each_kind_of_damage_is_found_and_named(place):
    store, files = place
    manifests = {step: save(store, step) for step in (10, 20, 30, 40, 50, 60)}
    paths = {step: manifest.place.part(1) for step, manifest in manifests.items()}
    files.delete(paths[10])
    files.write(paths[20], [layer_bytes(20, 1)[:-3]])
    files.write(paths[30], [layer_bytes(30, 0)])  # of another layer, as long
    raw = files.read(manifests[40].place.manifest, 0, 10**6)
    files.write(manifests[40].place.manifest, [raw[: len(raw) // 2]])
    files.write(manifests[50].place.manifest, [files.read(manifests[60].place.manifest, 0, 10**6)])
    found = {one.attempt.step: one for one in store.list()}
    assert {step: one.state.value for step, one in found.items()} == {
        60: "Complete",
        50: "Damaged",
        40: "Damaged",
        30: "Complete",
        20: "Damaged",
        10: "Damaged",
    }
    assert found[10].reason == "layer-00001.safetensors is missing"
    assert (
        found[20].reason
        == f"layer-00001.safetensors has {len(layer_bytes(20, 1)) - 3} bytes, expected {len(layer_bytes(20, 1))}"
    )
    assert "cannot be read" in found[40].reason
    assert found[50].reason == f"the manifest is that of {manifests[60].place.folder}"
    messages = {10: "is not there", 20: "has 337 bytes, expected 340", 30: "has other contents than were written"}
    for step, message in messages.items():
        with pytest.raises(CheckpointDamaged, match=rf"{manifests[step].place.part(1)} {message}"):
            store.read_part(manifests[step], 1)
        assert [bool(problem) for _, problem in store.verify(manifests[step])] == [False, True]
    files.write(paths[30], [layer_bytes(30, 1) + b"more"])
    with pytest.raises(CheckpointDamaged, match="has more than 340 bytes, expected 340"):
        store.read_part(manifests[30], 1)
    files.write(paths[30], [b""])
    with pytest.raises(CheckpointDamaged, match="has 0 bytes, expected 340"):
        store.read_part(manifests[30], 1)


def test_what_is_not_ours_is_left_alone(place):
    store, files = place
    for path in (
        "notes.txt",
        "step-20-a/layer",
        "step-000000020/manifest.json",
        "other/step-000000020-a/manifest.json",
    ):
        files.write(path, [b"x"])
    save(store, 20)
    assert listed(store) == [(20, "Complete")]
    store.delete(store.list()[0].attempt)
    assert store.list() == ()
    assert files.read("notes.txt", 0, 10) == b"x"


def test_files_of_a_folder_are_durable_before_they_have_their_name(tmp_path, monkeypatch):
    steps = []
    for name in ("fsync", "replace", "link"):
        real = getattr(os, name)

        def noted(*arguments, name=name, real=real):
            target = os.readlink(f"/proc/self/fd/{arguments[0]}") if name == "fsync" else str(arguments[1])
            steps.append((name, Path(target).name.split(".")[1 if ".partial" in target else 0]))
            return real(*arguments)

        monkeypatch.setattr(os, name, noted)
    store = CheckpointStore(str(tmp_path / "run"), IMPATIENT)
    attempt = CheckpointId(20, "a")
    part = store.write_part(attempt, 0, [b"x"])
    folder = attempt.folder
    made = [("fsync", tmp_path.name), ("fsync", "run")]
    assert steps == [*made, ("fsync", "layer-00000"), ("replace", "layer-00000"), ("fsync", folder)]
    steps.clear()
    store.commit(make_manifest(attempt, [part]))
    assert steps == [("fsync", "manifest"), ("link", "manifest"), ("fsync", folder)]
    assert sorted(path.name for path in (tmp_path / "run" / folder).iterdir()) == [
        "layer-00000.safetensors",
        "manifest.json",
    ]


def test_a_file_system_without_hard_links_keeps_manifests_too(tmp_path, monkeypatch):
    def link(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    store = CheckpointStore(str(tmp_path), IMPATIENT)
    manifest = save(store, 20)
    store.commit(manifest)
    assert store.list()[0].manifest == manifest
    with pytest.raises(CheckpointExists):
        store.commit(msgspec.structs.replace(manifest, seed=4))


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    store = CheckpointStore(f"file://{tmp_path}/file", IMPATIENT)
    with pytest.raises(StoreUnavailable, match=rf"^cannot list {tmp_path}/file: Not a directory$"):
        store.list()
    with pytest.raises(StoreUnavailable, match=rf"^cannot write to {tmp_path}/file: "):
        store.probe()
    with pytest.raises(StoreUnavailable, match=rf"^cannot write {tmp_path}/file/step-000000001-a/layer-00000.safe"):
        store.write_part(CheckpointId(1, "a"), 0, [b"x"])
