"""What the modules of a layer leave in a forward beside its outputs."""

import torch
from torch import nn

from bamboo_trainer.tasks.capture import Capture, capturing, current


def test_it_is_there_within_the_forward_only_also_if_that_fails() -> None:
    outer, inner = Capture(), Capture()
    assert current() is None
    try:
        with capturing(outer):
            with capturing(inner):
                assert current() is inner
            assert current() is outer
            raise ValueError
    except ValueError:
        assert current() is None


def test_what_a_repetition_leaves_does_not_count() -> None:
    capture, module, value = Capture(), nn.Tanh(), torch.ones(1)
    capture.contribute(module, (value,))
    capture.add_loss("aux", value)
    capture.close()
    capture.contribute(module, (value,))
    capture.add_loss("aux", value)
    assert capture.contributed == [(module, (value,))]
    assert capture.losses == [("aux", value)]
