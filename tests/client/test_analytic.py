"""Profiles computed for a device from counted operations and bytes."""

import msgspec
import pytest

from bamboo.profiles.analytic import LayerCount, TaskCounts, analytic_profile, operation_seconds
from bamboo.profiles.devices import device_table
from bamboo.profiles.files import counted_names, read_profile, shipped_names
from bamboo_core.planning.profile import ModelProfile, ProfiledTask, ProfileError, parse_profile, to_json

LAYER = LayerCount(
    forward=(("fp32", 2_000_000_000_000, 8, 3), ("bf16", 0, 9_000_000_000, 1)),
    backward=(("fp32", 1, 1, 10),),
    parameters=400,
    optimizer=800,
    gradients=400,
    activations=5,
    boundary=7,
    cost=9.0,
)
COUNTS = TaskCounts(name="x", samples=2, layers=(LAYER,), task=ProfiledTask(entrypoint="a:b"), source="made up")
TABLE = device_table()


def rate(profile: ModelProfile) -> float:
    """Return the samples per second on one device, without the optimizer's step."""
    return profile.samples / sum(layer.forward + layer.backward for layer in profile.layers)


def test_an_operation_takes_as_long_as_its_products_its_bytes_or_its_launch() -> None:
    device, launch = TABLE.named("V100"), TABLE.launch.seconds
    products, memory = device.products["fp32"].reached, device.bandwidth.reached
    assert operation_seconds(("fp32", 10**12, 8, 3), device, launch) == pytest.approx(3 * 10**12 / products)
    assert operation_seconds(("fp32", 8, 10**9, 1), device, launch) == pytest.approx(10**9 / memory)
    assert operation_seconds(("fp32", 8, 8, 7), device, launch) == pytest.approx(7 * launch)
    assert operation_seconds(("fp8", 10**12, 8, 1), device, launch) == pytest.approx(10**12 / products)


def test_layers_have_the_counted_bytes_and_computed_seconds() -> None:
    counts = msgspec.structs.replace(COUNTS, layers=(msgspec.structs.replace(LAYER, times=2), LAYER))
    found = analytic_profile(counts, "a100")
    device = TABLE.named("a100")
    assert (found.name, found.samples, len(found.layers), found.device) == ("x@a100", 2, 3, "NVIDIA A100 80 GB")
    one = found.layers[2]
    products, memory = device.products["fp32"].reached, device.bandwidth.reached
    assert one.forward == pytest.approx(3 * 2e12 / products + 9e9 / memory, rel=1e-5)
    assert one.backward == pytest.approx(10 * TABLE.launch.seconds)
    assert one.update == pytest.approx((2 * (400 + 800) + 400) / memory, rel=1e-5)
    sizes = (one.parameters, one.optimizer, one.gradients, one.activations, one.boundary, one.cost)
    assert sizes == (400, 800, 400, 5, 7, 9.0)
    assert found.machine.memory == 80 * 10**9
    assert parse_profile("x", to_json(found)) == found, "it is a profile like any other"
    assert "layers.seconds" in found.estimated
    assert "arXiv 2402.13499" in found.sources["layers.seconds"].text


@pytest.mark.parametrize("model", counted_names())
def test_every_model_is_a_profile_on_every_device(model: str) -> None:
    rates = {name: rate(read_profile(f"{model}@{name}")) for name in TABLE.devices}
    assert rates["h200"] >= rates["h100"] > rates["a100"] > rates["v100"] > rates["t4"] > 0
    published = read_profile(f"{model.removesuffix('-bf16')}-v100")
    assert [layer.parameters for layer in published.layers] == [
        layer.parameters for layer in read_profile(f"{model}@a100").layers
    ]


@pytest.mark.parametrize(("model", "least", "most"), [("bert", 1.0, 1.4), ("gpt-2", 1.0, 1.3), ("vgg", 4, 10)])
def test_beside_the_published_systems_profiles(model: str, least: float, most: float) -> None:
    """Layers computed for a V100 are faster than in published runs, which include the overhead of many machines."""
    assert f"{model}-v100" in shipped_names()
    assert least < rate(read_profile(f"{model}@v100")) / rate(read_profile(f"{model}-v100")) < most


def test_a_hyphen_may_be_left_out_and_what_is_not_known_is_named() -> None:
    assert read_profile("gpt2@H100") == read_profile("gpt-2@h100")
    with pytest.raises(ProfileError, match=r"device 'b900'; known are v100, t4, a10g, l4, l40s, a100, h100, h200"):
        read_profile("bert@b900")
    with pytest.raises(ProfileError, match=r"layers of 'mine' are not counted; those of alexnet, .* --device counts"):
        read_profile("mine@a100")
