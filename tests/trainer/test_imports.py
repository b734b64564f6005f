"""What a worker imports when it starts."""

import gc

from bamboo_trainer.worker.launch.imports import lasting_imports


def test_what_is_imported_is_never_looked_through_for_garbage() -> None:
    before = gc.get_freeze_count()
    with lasting_imports():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made)
