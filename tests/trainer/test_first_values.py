"""Initial values of a module that was built of fake tensors, which take no memory."""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import plain_models
from bamboo_trainer.split.first_values import without_values


def test_values_that_are_made_later_are_those_of_the_constructor() -> None:
    """Values made later have the constructor's bits, since all are made at once and no random draw is left out."""
    torch.manual_seed(3)
    with without_values(FakeTensorMode(allow_non_fake_inputs=True)) as values:
        imagined = plain_models.Dictionaries()
    torch.manual_seed(7)
    expected = plain_models.Dictionaries()
    assert imagined.rates == expected.rates
    torch.manual_seed(7)
    made = values.of(imagined.state_dict(keep_vars=True).values())
    assert all(torch.equal(m, e) for m, e in zip(made, expected.state_dict().values(), strict=True))
    assert torch.equal(values.of([imagined.ramp])[0], expected.ramp)


def test_a_value_that_comes_from_what_was_there_before_is_made_from_it() -> None:
    def make() -> nn.Linear:
        linear = nn.Linear(2, 2)
        nn.init.constant_(linear.weight, 3)
        nn.init.constant_(linear.bias, 5)
        with torch.no_grad():
            linear.weight.copy_(linear.weight * 2 + linear.bias)
            nn.init.trunc_normal_(linear.bias[1:], mean=1, std=1e-9)
        return linear

    with without_values(FakeTensorMode(allow_non_fake_inputs=True)) as values:
        imagined = make()
    weight, bias = values.of([imagined.weight, imagined.bias])
    assert torch.equal(weight, torch.full((2, 2), 11.0))
    torch.testing.assert_close(bias, torch.tensor([5.0, 1.0]))
