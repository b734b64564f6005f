"""The load balancing loss of experts, compared with that of transformers."""

from typing import Any

import pytest
import torch

from bamboo_trainer.models import huggingface
from bamboo_trainer.tasks.running_buffers import Capture, capturing
from from_module_kit import check_gradients
from transformers_kit import FAMILIES, config_of, pair_of, run, transformers


@pytest.mark.parametrize(
    ("family", "padding"),
    [
        ("mixtral", True),
        *(pytest.param(f, p, marks=pytest.mark.slow) for f in ("qwen3_moe", "jetmoe") for p in (True, False)),
    ],
)
def test_experts_are_balanced_as_by_transformers(family: str, padding: bool) -> None:
    config = config_of(family, data={"padding": padding}, routerAuxLossCoef=0.5)
    task, layers, model = pair_of(config)
    inputs, (labels,) = task.dataset.batch([1, 5, 7])
    mask = inputs[1] if padding else None
    output = model(inputs[0], mask, labels=labels, shift_labels=labels, output_router_logits=True)
    capture = Capture()
    with capturing(capture):
        (logits,) = run(layers, inputs)
    ((name, added),) = capture.losses
    assert name == "router"
    coefficient = model.config.aux_loss_coef if family == "jetmoe" else model.config.router_aux_loss_coef
    torch.testing.assert_close(added, 0.5 * output.aux_loss)
    ours, theirs = task.loss((logits,), (labels,)), output.loss - coefficient * output.aux_loss
    (ours.total / ours.weight + added).backward()
    (theirs + 0.5 * output.aux_loss).backward()
    check_gradients(layers, model)


def test_whether_experts_are_balanced_is_said_as_for_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def coefficient(**config: Any) -> float | None:
        beside = huggingface.build(config_of("mixtral", **config)).layers[0].func.__self__.route.alongside
        if beside is None:
            return None
        sums = beside.begin((torch.zeros(1),))[0] + 1
        capture = Capture()
        with capturing(capture):
            beside.end((sums,))
        ((_, added),) = capture.losses
        return float(added / beside.loss(sums))

    assert coefficient() is None
    assert coefficient(routerAuxLossCoef=0.25) == pytest.approx(0.25)
    monkeypatch.setitem(FAMILIES, "mixtral", FAMILIES["mixtral"] | {"output_router_logits": True})
    assert coefficient() == pytest.approx(transformers.MixtralConfig().router_aux_loss_coef)
    assert coefficient(routerAuxLossCoef=0) is None
    with pytest.raises(ValueError, match="transformers has no loss that balances experts for a GPT2LMHeadModel"):
        huggingface.build(config_of("gpt2", routerAuxLossCoef=0.1))
