"""Tasks: what ours learn, and which sentence a faulty one gets."""

from dataclasses import replace

import reference
from bamboo_trainer.loading import load_task
from bamboo_trainer.tasks.inspection.costs import layer_costs
from stage_kit import CONFIG, small_gpt


def test_the_models_learn_and_are_costed(tmp_path):
    task = load_task("bamboo_trainer.models.mlp:build", {"samples": 256, "blocks": 2, "width": 16})
    config = replace(CONFIG, max_gradient_norm=None, micro_batch_size=32)
    losses, _ = reference.train(task, config, 60)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    language = small_gpt(tmp_path)
    costs = layer_costs(language, 2)
    assert len(costs) == 4
    assert costs == layer_costs(language, 2)
    assert costs[1] == costs[2] > costs[0] > 0


def test_attention_is_counted_however_it_is_computed(tmp_path):
    """With dropout it is two plain products, without a kernel of its own, and some more to read and write."""
    text = tmp_path / "text"
    text.write_text("def f(): pass\n" * 20)
    config = {"dModel": 32, "heads": 2, "blocks": 2, "context": 16, "text": str(text)}
    counted = [
        layer_costs(load_task("bamboo_trainer.models.gpt:build", {**config, "dropout": dropout}), 2)
        for dropout in (0.0, 0.1)
    ]
    for plain, dropped in list(zip(*counted, strict=True))[1:3]:
        assert plain < dropped < 2 * plain
