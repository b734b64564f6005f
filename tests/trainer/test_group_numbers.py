"""Numbers of parameter groups that change from step to step."""

import pytest

from bamboo_trainer.checkpoint.layer_file import decode
from bamboo_trainer.stage.stage import build_stage
from bamboo_trainer.tasks.task_errors import TaskError
from split_state_kit import LAYERS, SPLITS, Averaging, Listing, OfWhole, files_of
from stage_kit import CONFIG, chain, one_step, small_task, whole_state


def counting(kind):
    return small_task(layers=LAYERS, optimizer=lambda named: kind([p for _, p in named], lr=0.1))


def test_a_stage_that_is_ahead_goes_back_with_the_numbers_of_its_groups():
    """Also to before the first step, when some of them were not there."""
    task = counting(Averaging)
    stage = build_stage(task, 0, SPLITS[0], CONFIG)
    kept = [whole_state(stage)]
    for step in range(3):
        one_step([stage], step)
        kept.append(whole_state(stage))
    digests = []
    for version in (1, 0, 3):
        other = build_stage(task, 0, SPLITS[0], CONFIG)
        other.values.restore(kept[version])
        stage.values.restore(kept[version])
        for step in range(version, 5):
            one_step([stage], step)
            one_step([other], step)
        digests += [stage.values.digest(), other.values.digest()]
    assert len(set(digests)) == 1


def test_numbers_that_depend_on_the_split_are_refused_on_another_one_only():
    task = counting(OfWhole)
    stages = chain(task, SPLITS[1])
    one_step(stages, 0)
    states = {layer: decode(data) for layer, data in files_of(stages).items()}
    for index, same in enumerate(chain(task, SPLITS[1])):
        same.values.restore(states)
        assert same.values.digest() == stages[index].values.digest()
    whole = build_stage(task, 0, SPLITS[0], CONFIG)
    digest = whole.values.digest()
    with pytest.raises(ValueError, match=r"'size' of the optimizer's parameter group differs between .*how the layers"):
        whole.values.restore(states)
    assert (whole.values.digest(), whole.values.version) == (digest, 0)


def test_an_optimizer_whose_groups_change_in_what_is_no_number_is_refused_by_name():
    stage = build_stage(counting(Listing), 0, SPLITS[0], CONFIG)
    with pytest.raises(TaskError, match="the optimizer changes 'rates' of its parameter groups, which is list"):
        one_step([stage], 0)
