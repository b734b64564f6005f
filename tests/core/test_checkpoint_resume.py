"""From which checkpoint a job goes on."""

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.checkpoint.resume import choose
from checkpoint_kit import DIGEST, EPOCH, complete
from checkpoint_list_kit import damaged, torn, unfinished, unreadable

OTHER = "f" * 16


NOW = EPOCH + 1000.0


def test_the_newest_sound_one_of_this_training_is_taken():
    found = [complete(100), complete(200), unfinished(600), torn(500), damaged(400), unreadable(450)]
    found.append(complete(300, "o", digest=OTHER))
    choice = choose(found, DIGEST)
    assert choice.manifest is not None
    assert choice.manifest.step == 200
    assert [(attempt.step, reason) for attempt, reason in choice.passed] == [
        (500, "the manifest cannot be read"),
        (450, "permission denied"),
        (400, "layer-00001.safetensors is missing"),
        (300, "it is of another training (job small): its task or its training section differs"),
    ]


def test_one_that_turned_out_to_be_damaged_is_passed_over():
    found = [complete(100), complete(200), complete(200, "b", created=NOW)]
    assert choose(found, DIGEST).manifest.attempt == "b"
    choice = choose(found, DIGEST, bad=[CheckpointId(200, "b")])
    assert (choice.manifest.step, choice.manifest.attempt) == (200, "a")
    assert choice.passed == ((CheckpointId(200, "b"), "a file of it is damaged, or what it was made of was wrong"),)
    none = choose(found, DIGEST, layers=3)
    assert none.manifest is None
    assert none.passed[0][1] == "it has 2 layers, and the task has 3"
    assert choose([], DIGEST).manifest is None
