"""Choices among a store's checkpoints: the newest or a given step's, the one to resume from, and those to remove."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.checkpoint.manifest import CheckpointError
from bamboo_core.checkpoint.selection import (
    DEAD_AFTER_SECONDS,
    ListedCheckpoint,
    ListedState,
    choose,
    find,
    newest_first,
    removable,
)
from checkpoint_kit import DIGEST, EPOCH, complete


def unfinished(step, id="u", modified=EPOCH):
    return ListedCheckpoint(
        attempt=CheckpointId(step, id), state=ListedState.UNFINISHED, modified=modified, reason="it was never committed"
    )


def damaged(step, id="d", **options):
    return replace(
        complete(step, id, **options), state=ListedState.DAMAGED, reason="layer-00001.safetensors is missing"
    )


def torn(step, id="t"):
    return ListedCheckpoint(
        attempt=CheckpointId(step, id), state=ListedState.DAMAGED, reason="the manifest cannot be read", modified=EPOCH
    )


def unreadable(step, id="r"):
    return ListedCheckpoint(attempt=CheckpointId(step, id), state=ListedState.UNREADABLE, reason="permission denied")


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


def removed(found, keep, **options):
    return [f"{attempt.step}{attempt.id}" for attempt in removable(found, keep, now=NOW, **options)]


@pytest.mark.parametrize(
    ("found", "keep", "options", "expected"),
    [
        ([complete(s) for s in (100, 200, 300, 400)], 3, {}, ["100a"]),
        ([complete(s) for s in (100, 200, 300)], 0, {}, ["100a", "200a"]),
        ([complete(100), damaged(200)], 3, {}, []),  # nothing newer is complete
        ([damaged(100), torn(150), complete(200)], 3, {}, ["100d", "150t"]),
        ([unreadable(100), complete(200)], 1, {}, []),
        ([complete(100, "o", digest=OTHER), complete(200), complete(300)], 1, {"digest": DIGEST}, ["200a"]),
        ([damaged(100, digest=OTHER), complete(300)], 1, {"digest": DIGEST}, []),
        ([complete(100, "o", digest=OTHER), complete(200)], 1, {}, ["100o"]),
        # Started anew at step 0 beside what an earlier run left: what was written last stays, too.
        ([complete(20, "n", created=NOW), complete(900), complete(800)], 1, {}, ["800a"]),
        ([unfinished(100, modified=EPOCH + 150), complete(200)], 3, {}, ["100u"]),
        ([unfinished(200, modified=EPOCH + 150), complete(200)], 3, {}, ["200u"]),
        ([unfinished(300, modified=EPOCH + 150), complete(200)], 3, {}, []),
        ([unfinished(100, modified=EPOCH + 250), complete(200)], 3, {}, []),  # somebody writes it now
        ([unfinished(100)], 3, {"dead_after": 999.0}, ["100u"]),
        ([unfinished(100)], 3, {"dead_after": 1001.0}, []),
        ([unfinished(100, modified=None), complete(200)], 3, {}, []),
    ],
)
def test_only_what_retention_allows_is_removed(found, keep, options, expected):
    assert removed(found, keep, **options) == expected


_FOUND = st.lists(
    st.builds(
        lambda kind, step, id, age: kind(step, id) if kind is not unfinished else unfinished(step, id, NOW - age),
        st.sampled_from([complete, damaged, torn, unreadable, unfinished]),
        st.integers(0, 6),
        st.sampled_from("abc"),
        st.floats(0, 2 * DEAD_AFTER_SECONDS),
    ),
    max_size=12,
    unique_by=lambda one: one.attempt,
)


@given(_FOUND, st.integers(-1, 4))
def test_a_removal_never_touches_what_a_job_would_resume_from(found, keep):
    gone = set(removable(found, keep, now=NOW))
    before, after = choose(found, DIGEST), choose([one for one in found if one.attempt not in gone], DIGEST)
    assert after.manifest == before.manifest
    sound = sum(one.state is ListedState.COMPLETE for one in found)
    left = sum(one.state is ListedState.COMPLETE and one.attempt not in gone for one in found)
    assert left >= min(sound, max(1, keep))
    assert not any(one.state is ListedState.UNREADABLE for one in found if one.attempt in gone)
    assert removable([one for one in found if one.attempt not in gone], keep, now=NOW) == ()


def test_the_one_with_the_best_score_stays():
    def scored(step, score):
        one = complete(step)
        return replace(one, manifest=msgspec.structs.replace(one.manifest, score=score))

    found = [
        scored(100, 1.0),
        scored(200, 3.0),
        scored(300, None),
        scored(400, 3.0),
        scored(500, 2.0),
        scored(600, 2.5),
    ]
    assert removed(found, 2) == ["100a", "300a", "400a"], "of equal ones the oldest is the best"
    assert removed([scored(100, None), scored(200, None), scored(300, None)], 1) == ["100a", "200a"]
