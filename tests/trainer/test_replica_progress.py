"""When an owner waits for a replica, and what it owes it."""

from bamboo_trainer.commit.replica_progress import CLOSE_STEPS, PATIENCE_STEPS, Owed, ReplicaProgress


def filled(at: int = 5) -> ReplicaProgress:
    """A replica that has been given version `at`, and holds it."""
    progress = ReplicaProgress()
    assert progress.announced(-1, -1, at, True) is Owed.STATE
    assert progress.announced(at, at, at + 4, True) is Owed.NOTHING
    return progress


def test_a_replica_without_a_state_holds_nobody_back() -> None:
    progress = ReplicaProgress()
    progress.announced(-1, -1, 5, True)
    assert not any(progress.holds_back(step, strict) for step in range(5, 100) for strict in (False, True))


def test_one_that_lags_far_behind_is_waited_for_when_it_is_close_or_late() -> None:
    progress = filled()
    assert not progress.holds_back(5 + CLOSE_STEPS + 1, False)
    assert progress.holds_back(5 + CLOSE_STEPS, False)
    assert not progress.holds_back(5 + 4 + PATIENCE_STEPS - 1, False)
    assert progress.holds_back(5 + 4 + PATIENCE_STEPS, False)
    assert not progress.holds_back(5, False), "it holds what this step takes"


def test_one_whose_state_is_on_its_way_again_holds_nobody_back() -> None:
    progress = filled()
    assert progress.relinked(7) is Owed.STATE
    assert not any(progress.holds_back(step, False) for step in range(7, 100))
    assert progress.announced(7, 7, 9, True) is Owed.NOTHING
    assert progress.holds_back(9, False)


def test_one_that_is_level_is_counted_once_and_waited_for_from_then_on() -> None:
    progress = filled()
    progress.announced(9, 9, 9, True)
    assert [progress.caught_up(9), progress.caught_up(9)] == [True, False]
    assert progress.holds_back(10, False)
    assert not progress.holds_back(9, False)
    assert progress.holds_back(9, True), "it has not got this step's gradients"


def test_one_that_can_reach_its_new_owners_version_alone_is_given_gradients_only() -> None:
    """It had the gradients before the last owner was lost; a whole state would take long."""
    progress = ReplicaProgress()
    assert progress.announced(4, 5, 5, True) is Owed.GRADIENTS
    assert progress.announced(4, 5, 6, True) is Owed.NOTHING, "it is on its way, and gets all gradients"
    assert progress.announced(6, 6, 6, True) is Owed.NOTHING
    assert progress.caught_up(6)
    assert ReplicaProgress().announced(4, 4, 5, True) is Owed.STATE


def test_one_that_has_what_it_needs_and_no_time_to_apply_it_is_waited_for() -> None:
    """It runs a stage that never waits for another one's, so that it comes to a replica only if the commit waits."""
    progress = ReplicaProgress()
    assert progress.announced(22, 23, 23, True) is Owed.GRADIENTS
    assert progress.holds_back(24, False)
    assert progress.announced(22, 23, 39, True) is Owed.NOTHING
    assert progress.holds_back(39, False)


def test_one_that_has_dropped_its_state_is_given_another_one() -> None:
    """It was no replica for a plan that the owner has missed."""
    progress = filled()
    progress.announced(9, 9, 9, True)
    assert progress.caught_up(9)
    assert progress.announced(-1, -1, 10, True) is Owed.STATE
    assert not progress.holds_back(10, True)
    assert progress.announced(-1, -1, 11, True) is Owed.NOTHING, "it is on its way"
    assert progress.announced(11, 11, 11, True) is Owed.NOTHING
    assert progress.caught_up(11)


def test_one_that_is_ahead_of_its_new_owner_is_given_what_that_has_for_later() -> None:
    """Final gradients that the owner has from the one before it are not sent to anybody again by themselves."""
    assert ReplicaProgress().announced(6, 6, 5, True) is Owed.GRADIENTS
