"""Compiled layers: equal bits on every worker, code made before the first forward if possible, no silent fallback."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import plain_models
from bamboo_core.coordinator.events import Outcome
from bamboo_trainer.stage import compilation
from bamboo_trainer.stage.stage import build_stage
from bamboo_trainer.task import Task, add_loss
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.user_code import build_layer
from bamboo_trainer.training import TrainingConfig
from stage_kit import CONFIG, SPLITS, at, begin, chain, microbatch, one_step, small_gpt, small_task, state_of
from training_job import job_of

pytest_plugins = ["compiled_fixtures"]
pytestmark = [
    pytest.mark.usefixtures("compiled_cache"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),  # torch's own, when its compiler is imported
]
COMPILED = replace(CONFIG, compile=True)


def made() -> int:
    """Return the number of graphs compiled in this process."""
    return int(counters["stats"]["unique_graphs"])


def trained(task: Task, split: Any, config: TrainingConfig, steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    stages = chain(task, split, config)
    return [one_step(stages, k, config) for k in range(steps)], state_of(stages)


class Detaching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.detach())


def test_a_layer_that_no_gradient_reaches_is_named() -> None:
    """A compiled layer whose successor in the stage detaches is refused: it would get zeros instead of no gradients."""
    task = small_task(layers=(lambda: nn.Linear(2, 2), lambda: nn.Linear(2, 2), Detaching))
    with pytest.raises(TaskError, match=r"layer 1 \(Linear\) is compiled .* no gradient reaches it"):
        one_step(chain(task, [(0, 3)], COMPILED), 0, COMPILED)
    one_step(chain(task, [(0, 2), (2, 3)], COMPILED), 0, COMPILED)


def test_blocks_of_a_split_module_are_compiled_and_its_own_code_is_not() -> None:
    task, config = plain_models.build({"model": "sizes"}), at("fp32", COMPILED)
    before = made()
    stages = chain(task, [(0, len(task.layers))], config)
    own = [build_layer(task, 0, index).has_own_code for index in range(len(task.layers))]
    assert 0 < made() - before <= own.count(False) < len(own)
    losses = [one_step(stages, k, config) for k in range(2)]
    plain, _ = trained(task, [(0, len(task.layers))], replace(config, compile=False), 2)
    assert losses == pytest.approx(plain, rel=1e-5)


def test_all_code_is_there_before_the_first_forward_and_a_repetition_has_the_same_bits(tmp_path: Path) -> None:
    """No first step, takeover or rehearsal waits for a compiler. Repetitions on another holder, layer by layer, or
    after another microbatch have the bits of the first run.
    """
    task, before = small_gpt(tmp_path, dropout=0.1), made()
    one = chain(task, SPLITS[2], COMPILED)
    assert made() == before + 4
    assert all(stage.compile_seconds > 0 for stage in one)
    two = chain(task, SPLITS[2], COMPILED)
    ready = made()
    first = microbatch(one, [begin(s) for s in one], 5, 1)
    microbatch(two, [begin(s) for s in two], 5, 2)
    works = [begin(s) for s in two]
    second = microbatch(two, works, 5, 1)
    for a, b in zip(first, second, strict=True):
        assert a is not None
        assert b is not None
        assert all(map(torch.equal, a, b))
    assert first[0] is not None
    forwarding = two[1].start(5, 1, first[0])
    while not forwarding.done:
        with torch.no_grad():
            two[1].advance(forwarding)
    works[1].read(works[1].figures())
    assert torch.equal(forwarding.parts[0], torch.tensor(works[1].losses[1]))
    one_step(one, 0)
    one[1].rehearse(1, 0, microbatch(one, [begin(s) for s in one], 1, 0)[0])
    assert made() == ready


def test_the_first_spot_check_runs_compiled_layers(tmp_path: Path) -> None:
    job = job_of(small_gpt(tmp_path, dropout=0.1), (1, 1), 1, "None", compile=True).run()
    assert job.outcome is Outcome.COMPLETE
    assert "SpotCheck" in {fault.name for fault in job.executed}


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if float(x.detach().sum()) > 0 else self.inner(-x)


def norm() -> nn.Module:
    return nn.BatchNorm1d(3)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("layer", [Marked, norm])
def test_what_must_not_be_compiled_runs_as_it_is(layer: Callable[[], nn.Module], caplog) -> None:
    """BatchNorms and layers with `torch.compiler.disable` run uncompiled beside compiled ones; splits change no bit."""
    task = replace(small_task(), layers=(lambda: nn.Linear(2, 3), layer, lambda: nn.Linear(3, 2)))
    with caplog.at_level("INFO"):
        losses, state = trained(task, [(0, 2), (2, 3)], COMPILED, 1)
    assert any(message.startswith("layer 1 (") and "is not compiled, since" in message for message in caplog.messages)
    others, other = trained(task, [(0, 3)], COMPILED, 1)
    assert losses == others
    torch.testing.assert_close(state, other, rtol=0, atol=0)
    plain, _ = trained(task, [(0, 3)], CONFIG, 1)
    assert losses == pytest.approx(plain, rel=1e-5)


class Branches(nn.Module):
    """A layer with a branch that depends on values, so no single graph has both branches."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if float(x.detach().sum()) > 0 else x


class Prints(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        print(x.shape)
        return x


class Adds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        add_loss(x.square().mean())
        return x


@pytest.mark.parametrize("layer", [Branches, Prints, Adds])
def test_a_layer_that_is_no_one_graph_is_refused_by_name(layer: type[nn.Module]) -> None:
    task = replace(small_task(), layers=(lambda: nn.Linear(2, 3), layer, lambda: nn.Linear(3, 2)))
    with pytest.raises(
        TaskError, match=rf"^layer 1 \({layer.__name__}\) cannot be compiled \(spec\.training\.compile\)"
    ) as caught:
        build_stage(task, 0, [(0, 3)], COMPILED).forward(begin(build_stage(task, 0, [(0, 3)], CONFIG)), 0, 0, None)
    assert str(caught.value).endswith("torch.compiler.disable around its forward leaves it as it is")


def test_inputs_of_ever_new_forms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer whose inputs have too many forms is refused, since torch would compile it on some workers only."""
    monkeypatch.setattr(compilation, "MOST_FORMS", 2)
    compiled = compilation.CompiledLayers({0: nn.Tanh()}, deterministic=True)
    for rows in (2, 3):
        compiled.call(0, torch.ones(rows, 2))
    with pytest.raises(TaskError, match=r"layer 0 \(Tanh\) .* inputs have more than 2 forms"):
        compiled.call(0, torch.ones(99, 2))


def test_a_layer_that_cannot_take_zeros_is_compiled_with_its_first_inputs(caplog) -> None:
    class Divides(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.linalg.inv(x.T @ x + 0 * x.sum()) @ x.T

    task = replace(small_task(), layers=(Divides, lambda: nn.Linear(2, 2)))
    with caplog.at_level("INFO"):
        stage = build_stage(task, 0, [(0, 2)], replace(COMPILED, micro_batch_size=2))
    assert any("layer 0 is compiled in its first forward" in message for message in caplog.messages)
    before = made()
    stage.forward(stage.begin([0], [0, 1]), 0, 0, None)
    assert made() >= before
