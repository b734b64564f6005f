"""Faults of a store, such as errors, torn files and wrong bytes; and writers that are killed."""

import os
from itertools import count
from pathlib import Path

import pytest

from bamboo_core.checkpoint.selection import ListedState, choose, removable
from bamboo_core.checkpoint.store import CheckpointStore
from bamboo_core.storage.bounded import StorageError, StoreUnavailable
from checkpoint_kit import DIGEST, IMPATIENT, FaultyFileSystem, Killed, faulty_store, layer_bytes, save, states

FOREVER = 1e12  # a time at which everything that was interrupted is dead


@pytest.mark.parametrize("fault", ["fails", "answer lost", "forgets", "tears", "wrong bytes"])
def test_a_fault_that_passes_is_not_noticed_or_leaves_nothing_behind(fault):
    """A fault leaves the earlier checkpoint usable; the new one is correct, unless the fault writes wrong bytes."""
    for number in count():
        filesystem = FaultyFileSystem({})
        store = faulty_store(filesystem)
        before = save(store, 20)
        filesystem.operations.clear()
        filesystem.faults = {number: fault}
        problem = None
        try:
            written = save(store, 40)
        except StorageError as error:
            problem = error
        happened = number < len(filesystem.operations)
        filesystem.faults = {}
        if fault in ("fails", "answer lost", "forgets", "tears"):
            assert problem is None, (number, problem)  # it was tried again
        if problem is None and fault != "wrong bytes":
            assert [p for _, p in store.verify(written)] == ["", ""]
        usable = [
            one.manifest for one in store.list() if one.manifest and not any(p for _, p in store.verify(one.manifest))
        ]
        assert before in usable
        if not happened:
            return


@pytest.mark.parametrize(
    ("fault", "message", "tried"),
    [
        ("fails", r"reset by https://store/?, tried 3 times", 3),
        ("denies", r"permission denied \(AccessDenied: token=\)", 1),
        ("full", "no space left in the store", 1),
        ("forgets", "the store has forgotten a file that was written.*tried 3 times", 3),
        ("tears", "the store has 170 bytes of a file of 340 bytes.*tried 3 times", 3),
    ],
)
def test_a_fault_that_stays_is_one_sentence_about_the_file(fault, message, tried):
    filesystem = FaultyFileSystem(lambda number, operation: fault if operation == "write" else None)
    store = faulty_store(filesystem)
    with pytest.raises(
        StoreUnavailable, match=rf"^cannot write memory://run/step-.*/layer-00000.safetensors: .*{message}"
    ) as e:
        save(store, 20)
    assert filesystem.operations.count("write") == tried
    assert not {"hunter2secret", "abcdef123"} & set(str(e.value).replace("/", " ").split())
    assert "secret" not in str(e.value)
    assert e.value.__cause__ is None
    assert e.value.__context__ is None or "secret" not in str(e.value.__context__)
    filesystem.faults = {}
    assert all(one.state is ListedState.UNFINISHED for one in store.list())


def test_a_store_that_cannot_be_read_now_loses_nothing():
    filesystem = FaultyFileSystem()
    store = faulty_store(filesystem)
    manifest = save(store, 20)
    filesystem.faults = lambda number, operation: "denies" if operation in ("read", "size") else None
    (found,) = store.list()
    assert found.state is ListedState.UNREADABLE
    assert found.reason.startswith(f"cannot read memory://run/{manifest.place.manifest}: permission denied")
    assert removable([found], 1, now=FOREVER) == ()
    with pytest.raises(StoreUnavailable):
        list(store.verify(manifest))
    filesystem.faults = lambda number, operation: "denies"
    with pytest.raises(StoreUnavailable, match=r"^cannot list memory://run: permission denied"):
        store.list()


@pytest.mark.parametrize("fault", ["killed before", "killed within", "killed after"])
def test_a_writer_killed_at_any_operation_leaves_no_torn_checkpoint(fault):
    for number in count():
        filesystem = FaultyFileSystem()
        store = faulty_store(filesystem)
        save(store, 20)
        filesystem.operations.clear()
        filesystem.faults = {number: fault}
        try:
            save(store, 40)
            killed = False
        except Killed:
            killed = True
        happened = len(filesystem.operations) > number
        filesystem.faults = {}
        check_after_kill(faulty_store(filesystem))
        if not happened:
            assert not killed
            assert number > 6
            return


def check_after_kill(store: CheckpointStore) -> None:
    """Check that a store has a whole checkpoint, and still works, after a writer of step 40 was killed."""
    choice = choose(store.list(), DIGEST)
    assert choice.manifest is not None
    assert choice.manifest.step in (20, 40)
    assert [store.read_part(choice.manifest, layer) for layer in range(2)] == [
        layer_bytes(choice.manifest.step, layer) for layer in range(2)
    ]
    repeated = save(store, 40)
    assert choose(store.list(), DIGEST).manifest.step == 40
    for attempt in removable(store.list(), 1, now=FOREVER):
        store.delete(attempt)
    left = store.list()
    assert {one.attempt for one in left} <= {repeated.place, choice.manifest.place}
    assert all(one.state is ListedState.COMPLETE for one in left)
    assert [problem for _, problem in store.verify(left[0].manifest)] == ["", ""]


@pytest.mark.parametrize("fault", ["killed before", "killed after"])
def test_a_removal_that_is_killed_leaves_no_torn_checkpoint(fault):
    for number in count():
        filesystem = FaultyFileSystem()
        store = faulty_store(filesystem)
        old = save(store, 20)
        save(store, 40)
        filesystem.operations.clear()
        filesystem.faults = {number: fault}
        killed = False
        try:
            store.delete(old.place)
        except Killed:
            killed = True
        filesystem.faults = {}
        for one in store.list():
            assert one.attempt.step == 40 or one.state in (ListedState.COMPLETE, ListedState.UNFINISHED)
            if one.state is ListedState.COMPLETE:
                assert [problem for _, problem in store.verify(one.manifest)] == ["", ""]
        for attempt in removable(store.list(), 1, now=FOREVER):
            store.delete(attempt)
        assert states(store) == [(40, "Complete")]
        if not killed:
            assert number > 1
            return


def test_a_process_killed_at_any_system_call_leaves_no_torn_checkpoint(tmp_path):
    """A real writer process, killed at any of its file system calls, leaves no torn checkpoint."""
    for number in count():
        folder = tmp_path / str(number)
        save(CheckpointStore(str(folder), IMPATIENT), 20)
        ended = run_and_end_at(number, folder)
        store = CheckpointStore(str(folder), IMPATIENT)
        check_after_kill(store)
        for one in store.list():
            store.delete(one.attempt)
        assert list(folder.iterdir()) == []
        if not ended:
            assert number > 20
            return


def run_and_end_at(number: int, folder: Path) -> bool:
    """Write step 40's checkpoint in a child that exits before file call `number` (from 0). Return whether it did so."""
    pid = os.fork()
    if pid == 0:
        try:
            end_at(number, folder)
            save(CheckpointStore(str(folder), IMPATIENT), 40)
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 9)
    return code == 9


def end_at(number: int, folder: Path) -> None:
    calls = count()
    for name in ("open", "write", "fsync", "replace", "link", "unlink", "mkdir", "close"):
        setattr(os, name, _ending(getattr(os, name), number, calls))


def _ending(real, number, calls):
    def called(*arguments, **options):
        if next(calls) == number:
            os._exit(9)
        return real(*arguments, **options)

    return called
