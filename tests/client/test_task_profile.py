"""Profiles made from the trainer's measurements."""

from functools import cache
from typing import Any

from bamboo.local.trainer_calls.task_profile import profile_of, surrounded
from bamboo_core.job.manifest import parse_manifest
from bamboo_trainer.profiling import profile
from profiling_kit import manifest


@cache
def measured() -> dict[str, Any]:
    return profile(manifest(), 3)


def test_every_layer_is_measured_with_the_jobs_microbatch() -> None:
    answer = measured()
    layers = answer["layers"]
    assert len(layers) == 5
    assert all(layer["forward"] > 0 and layer["backward"] > 0 and layer["update"] > 0 for layer in layers)
    width, length, samples = 16, 16, 2
    assert {layer["boundary"] for layer in layers[:-1]} == {4 * width * length * samples + length * samples}
    assert layers[1]["gradients"] == layers[1]["parameters"]
    assert layers[1]["optimizer"] >= 2 * layers[1]["parameters"]  # AdamW's two averages, and its counters
    assert answer["loopback"] > 1e6
    assert 0 <= answer["waited"] < 1
    spec, steady = parse_manifest(manifest()), answer | {"waited": 0.01, "unsteady": []}
    found = profile_of(spec, steady, 3)
    assert (found.network.flow, found.samples) == (answer["loopback"], 2)
    assert found.estimated == ("network", "storage", "times")
    given = surrounded(found, flow=1e8, machine=None, start=2.0)
    assert (given.network.flow, given.network.machine, given.times.start) == (1e8, 1e8, 2.0)
    assert given.estimated == ("storage",)
    busy = profile_of(spec, answer | {"waited": 0.3}, 3)
    assert "layers.seconds" in busy.estimated
    assert "the machine was busy: 30 % of the time no processor was free" in busy.sources["layers.seconds"].text


def test_layers_whose_times_differ_are_named_and_make_it_an_estimate() -> None:
    steady = measured() | {"waited": 0.0, "unsteady": [], "repeats": 12}
    spec = parse_manifest(manifest())
    found = profile_of(spec, steady, 3)
    assert "layers.seconds" not in found.estimated
    said = found.sources["layers.seconds"].text
    assert said.startswith("median of 3 to 12 microbatches of 2 on ")
    assert said.endswith("each known within 3 %")
    doubtful = profile_of(spec, steady | {"unsteady": [1, 4], "spread": 0.124}, 3)
    assert "layers.seconds" in doubtful.estimated
    assert (
        "not steady: of 2 of 5 layers (1, 4) the median is known within 12 % and not 3 %"
        in doubtful.sources["layers.seconds"].text
    )
