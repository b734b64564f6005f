"""`bamboo profile --device` asks the trainer, which needs no such device."""

from bamboo.local.trainer_calls.task_counts import counts_of
from bamboo.profiles.analytic import analytic_profile
from bamboo.profiles.files import read_devices
from bamboo_core.job.manifest import parse_manifest
from bamboo_trainer.counting import count
from bamboo_trainer.profiling import profile
from profiling_kit import manifest


def test_counted_layers_have_the_bytes_of_measured_ones() -> None:
    answer, measured = count(manifest()), profile(manifest(), 1)
    names = ("parameters", "optimizer", "gradients", "activations", "boundary", "cost")
    assert [[one[name] for name in names] for one in answer["layers"][:-1]] == [
        [one[name] for name in names] for one in measured["layers"][:-1]
    ]
    spec = parse_manifest(manifest())
    found = analytic_profile(counts_of(spec, answer), read_devices(), "l4")
    assert (found.name, found.samples, len(found.layers)) == ("tiny@l4", 2, 5)
    assert all(layer.forward > 0 and layer.backward > 0 and layer.update > 0 for layer in found.layers)


def test_a_task_that_cannot_be_loaded_is_a_problem() -> None:
    assert "nowhere" in count(manifest("nowhere:build"))["problem"]
