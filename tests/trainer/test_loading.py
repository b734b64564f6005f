"""Refusals of wrong entrypoints and faulty tasks, and the training facts that a `build` function gets."""

import re
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import reference
from bamboo_core.job.manifest import parse_manifest
from bamboo_trainer.check import check
from bamboo_trainer.loading import load_task
from bamboo_trainer.stage.stage import build_stage
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.training import shown_to_build
from bamboo_trainer.worker.loaded_job import load_job
from manifest_kit import bamboojob, training
from stage_kit import CONFIG, one_step, small_task


class Failing(nn.Module):
    def forward(self, x):
        raise RuntimeError("on purpose")


class Unequal(nn.Module):
    def forward(self, x):
        return [x]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": nn.Sequential(nn.Linear(2, 2))}, r"layers\[0\] is a module \(Linear\), expected a function"),
        (
            {"layers": (lambda: nn.Linear(2, 2), Failing)},
            r"layer 1 \(Failing\) raised RuntimeError: on purpose",
        ),
        ({"layers": (lambda: nn.Linear(2, 2), Unequal)}, r"layer 1 \(Unequal\) must return"),
        ({"layers": (lambda: 3,)}, "layer 0 returned int"),
        ({"layers": (lambda: nn.Linear(2, 2).double(),)}, r"parameter 0.weight is torch.float64"),
        ({"loss": lambda outputs, targets: outputs[0]}, "scalar"),
        ({"optimizer": lambda named: None}, "optimizer returned NoneType"),
    ],
)
def test_a_faulty_task_is_told_by_name(changes, message):
    task = small_task(**changes)
    with pytest.raises(TaskError, match=message):
        one_step([build_stage(task, 0, [(0, len(task.layers))], CONFIG)], 0)


FAULTY = {
    "few": lambda: small_task(),
    "class": lambda: small_task(learning_rate=torch.optim.lr_scheduler.CosineAnnealingLR),
    "number": lambda: small_task(learning_rate=0.1),
    "text": lambda: small_task(learning_rate=lambda step: "fast"),
    "not finite": lambda: small_task(learning_rate=lambda step: float("nan")),
    "sound": lambda: small_task(learning_rate=lambda step: torch.tensor(0.1)),
}


def faulty(config):
    return FAULTY[config["kind"]]()


@pytest.mark.parametrize(
    ("kind", "batch", "message"),
    [
        ("few", 16, "the dataset has 12 samples, expected at least the 16 of a step (spec.training.globalBatchSize)"),
        ("class", 8, "task.learning_rate: expected a function of the step that returns the rate, got the class Cosine"),
        ("number", 8, "task.learning_rate: expected a function of the step that returns the rate, got float"),
        ("text", 8, "task.learning_rate(0) raised ValueError"),
        ("not finite", 8, "task.learning_rate(0) returned nan, expected a finite number that is not negative"),
        ("sound", 12, None),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_trained(kind, batch, message):
    """`validate --load` refuses a faulty task, and so does a worker at its start."""
    task = {"entrypoint": "test_loading:faulty", "config": {"kind": kind}}
    document = bamboojob(task=task, training=training(2, batch, 4), topology={"stages": 2})
    assert str(check(document).get("problem")).startswith(str(message))
    with pytest.raises(TaskError, match=re.escape(message)) if message else nullcontext():
        load_job(document)


@pytest.mark.parametrize(
    ("entrypoint", "config", "message"),
    [
        ("nonsense", {}, "module:function"),
        ("no_such_module:build", {}, "cannot import 'no_such_module'"),
        ("bamboo_trainer.models.gpt:nothing", {}, "has no 'nothing'"),
        ("bamboo_trainer.models.gpt:VOCABULARY", {}, "non-callable"),
        ("builtins:dict", {}, "returned dict"),
        ("bamboo_trainer.models.mlp:build", {"learningRate": 0}, "learningRate must be positive, got 0.0"),
        ("bamboo_trainer.models.bert:build", {"size": "tiny", "maskToken": 97}, "maskToken: token 97 is outside"),
        ("bamboo_trainer.models.llama:build", {"size": "tiny", "theta": 0}, "theta must be at least 1, got 0.0"),
        ("bamboo_trainer.models.gpt:build", {"nosuch": 1}, "unknown key 'nosuch'"),
        ("bamboo_trainer.models.gpt:build", {"heads": 3, "dModel": 16}, "dModel must be a multiple"),
        ("bamboo_trainer.models.gpt:build", {"text": "/nowhere"}, "readable file"),
    ],
)
def test_a_wrong_entrypoint_or_config_gets_one_clear_sentence(entrypoint, config, message):
    with pytest.raises(TaskError, match=message):
        load_task(entrypoint, config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": (nn.Identity,) * 10_001}, "10001 layers, at most 10000 are accepted"),  # costs of as many are sent
        ({"costs": (1.0,)}, "Task.costs: expected one number for each of the 3 layers, got 1"),
        ({"costs": (1, -1.0, 1)}, r"Task.costs\[1\]: expected a number from 0 to 1e\+24, got -1.0"),
        ({"costs": ("1", 1, 1)}, r"Task.costs\[0\]: expected a number from 0 to 1e\+24, got '1'"),
        ({"metrics": [1]}, "Task.metrics: expected functions by name, got list of int"),
        ({"metrics": {f"m{i}": len for i in range(65)}}, "Task.metrics: 65 metrics, at most 64 are accepted"),
        ({"metrics": {"a-b": len}}, "Task.metrics: a name must be up to 64 letters, digits and underscores, got 'a-b'"),
        ({"decisions": [len]}, "Task.decisions: expected functions by name, got list"),
        ({"decisions": {"a.b": len}}, "Task.decisions: a name is 'a.b', expected letters, digits, _ and -"),
        ({"decisions": {str(n): len for n in range(17)}}, "Task.decisions: 17 decisions, at most 16 are accepted"),
        ({"callbacks": [len]}, "Task.callbacks: expected functions by name, got list"),
        ({"callbacks": {"a/b": len}}, "Task.callbacks: a name is 'a/b', expected letters, digits, _ and -"),
    ],
)
def test_parts_of_a_task_that_cannot_be_are_refused_when_it_is_loaded(changes, message, monkeypatch):
    monkeypatch.setattr(reference, "build_it", lambda config: small_task(**changes), raising=False)
    with pytest.raises(TaskError, match=message):
        load_task("reference:build_it", {})


def test_a_missing_module_says_where_it_was_looked_for(tmp_path, monkeypatch):
    folders = (tmp_path / "manifests", tmp_path / "here")
    folders[0].mkdir()
    (folders[0] / "needs_another.py").write_text("import no_such_package")
    monkeypatch.setattr(sys, "path", [*map(str, folders), *sys.path])
    for missing in ("no_such_module", "no_such.module"):
        with pytest.raises(TaskError) as caught:
            load_task(f"{missing}:build", {})
        start = f"cannot import '{missing}': there is no such module in {folders[0]} or {folders[1]} or "
        assert str(caught.value).startswith(start)
        assert str(caught.value).endswith(" or the installed packages")
    with pytest.raises(TaskError, match="'needs_another': ModuleNotFoundError: No module named 'no_such_package' \\("):
        load_task("needs_another:build", {})
    with pytest.raises(TaskError, match=r"the module \(.*/tokenize\.py\) has no 'build'"):
        load_task("tokenize:build", {})


SEEING = """
from stage_kit import small_task

SEEN = []


def wants(config, training):
    SEEN.append(training)
    return small_task()


def named(config, training=None):
    return wants(config, training)


def keyword(config, verbose=False):
    assert verbose is False
    return small_task()
"""


def test_build_sees_what_the_job_trains_with_if_it_asks(tmp_path, monkeypatch):
    (tmp_path / "seeing_task.py").write_text(SEEING)
    monkeypatch.syspath_prepend(str(tmp_path))
    document = bamboojob(
        task={"entrypoint": "seeing_task:wants"},
        training=training(40, 8, 2, seed=3, precision="bf16"),
        topology={"stages": 1},
    )
    facts = shown_to_build(parse_manifest(document).training)
    for name in ("wants", "named", "keyword"):
        load_task(f"seeing_task:{name}", {}, facts)
    assert [facts, facts] == sys.modules["seeing_task"].SEEN
    assert (facts.steps, facts.global_batch_size, facts.micro_batch_size) == (40, 8, 2)
    assert (facts.microbatches, facts.seed, facts.precision) == (4, 3, "bf16")
    assert check(document)["layers"] == 3
    assert sys.modules["seeing_task"].SEEN[-1] == facts
