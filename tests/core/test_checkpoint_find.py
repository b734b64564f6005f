"""Which checkpoint a person gets who asks for the newest, or for that of a step."""

import pytest

from bamboo_core.checkpoint.errors import CheckpointError
from bamboo_core.checkpoint.find import find
from bamboo_core.checkpoint.found import newest_first
from checkpoint_kit import complete
from checkpoint_list_kit import damaged, torn, unfinished


def test_a_person_gets_the_newest_or_that_of_a_step():
    found = sorted([complete(s) for s in (100, 200)] + [damaged(300), unfinished(400), torn(150)], key=newest_first)
    manifest, notes = find(found, "/run")
    assert manifest.step == 200
    assert notes == ("step-000000300-d is passed over: layer-00001.safetensors is missing",)
    assert find(found, "/run", 100) == (complete(100).manifest, ())
    with pytest.raises(CheckpointError, match=r"^/run has no complete checkpoint of step 7; complete: steps 200, 100$"):
        find(found, "/run", 7)
    with pytest.raises(CheckpointError, match=r"of step 150; step-000000150-t is passed over: .*; complete: steps 200"):
        find(found, "/run", 150)
    with pytest.raises(CheckpointError, match=r"^/run has no complete checkpoint$"):
        find([unfinished(400)], "/run")
