"""`bamboo profile` asks the trainer."""

from bamboo.job.manifest import parse_manifest
from bamboo.local.trainer_calls.task_profile import MachineOverrides, profile_of
from bamboo_trainer.profiling import profile
from profiling_kit import manifest


def test_every_layer_is_measured_with_the_jobs_microbatch() -> None:
    answer = profile(manifest(), 3)
    layers = answer["layers"]
    assert len(layers) == 5
    assert all(layer["forward"] > 0 and layer["backward"] > 0 and layer["update"] > 0 for layer in layers)
    width, length, samples = 16, 16, 2
    assert {layer["boundary"] for layer in layers[:-1]} == {4 * width * length * samples + length * samples}
    assert layers[1]["gradients"] == layers[1]["parameters"]
    assert layers[1]["optimizer"] >= 2 * layers[1]["parameters"]  # AdamW's two averages, and its counters
    assert answer["loopback"] > 1e6
    assert 0 <= answer["waited"] < 1
    found = profile_of(
        parse_manifest(manifest()), answer | {"waited": 0.01}, 3, MachineOverrides(flow=1e8, latency=0.001)
    )
    assert (found.network.flow, found.network.latency, found.samples) == (1e8, 0.001, 2)
    assert "network" not in found.estimated
    assert found.estimated == ("storage", "times")
    busy = profile_of(parse_manifest(manifest()), answer | {"waited": 0.3}, 3, MachineOverrides(flow=1e8))
    assert "layers.seconds" in busy.estimated
    assert "the machine was busy: 30 % of the time no processor was free" in busy.sources["layers.seconds"].text
