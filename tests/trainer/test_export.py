"""Exports of trained weights: the stages' state dict, in a file that any reader of safetensors can load."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.checkpoint.manifest import CheckpointDamaged
from bamboo_core.checkpoint.store import CheckpointStore
from bamboo_trainer.checkpoint.export import export, export_weights
from bamboo_trainer.checkpoint.layer_file import ExportError, encode, read_layer
from bamboo_trainer.checkpoint.sources import Checkpoint, open_source
from bamboo_trainer.stage.stage import build_stage
from checkpoint_kit import make_manifest
from export_kit import quiet, write
from stage_kit import CONFIG, chain, one_step, small_task, state_of


class Mixed(nn.Linear):
    """A layer with buffers of several sizes and types."""

    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("halves", torch.ones(5, dtype=torch.bfloat16))
        self.register_buffer("longs", torch.arange(3))
        self.register_buffer("doubles", torch.ones((), dtype=torch.float64))
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("nothing", torch.empty(0, 2))


LAYERS = (lambda: nn.Linear(2, 3), Mixed, nn.Tanh, Mixed, lambda: nn.Linear(3, 2))


TASK = small_task(layers=LAYERS, optimizer=lambda named: torch.optim.AdamW(named), tied=(("1.weight", "3.weight"),))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a store, the manifest of its checkpoint of two stages after one step, and the stages' state."""
    folder = tmp_path_factory.mktemp("run")
    store = CheckpointStore(str(folder))
    stages = chain(TASK, [(0, 2), (2, 5)])
    one_step(stages, 0)
    return store, write(store, stages, 1), state_of(stages)


def test_an_export_is_the_stages_state_dict(trained, tmp_path):
    store, manifest, expected = trained
    output, seen = tmp_path / "out", []

    def progress(at, of):
        seen.append((at, of))

    done = export(Checkpoint(store, manifest), output, force=False, progress=progress)
    state = load_file(output)
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (state[name].dtype, state[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(state[name], tensor), name
    assert (done.step, done.tensors) == (1, len(expected))
    assert [done for done, _ in seen] == list(range(1, seen[0][1] + 1)), "what is told has been read"
    assert len(seen) > 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with safe_open(output, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert torch.equal(file.get_tensor("layers.3.weight"), expected["layers.3.weight"])


def test_what_is_there_is_replaced_only_with_force(trained, tmp_path):
    store, manifest, expected = trained
    output = tmp_path / "out"
    output.write_text("precious")
    with pytest.raises(ExportError, match="out exists; force replaces it"):
        export(Checkpoint(store, manifest), output, force=False, progress=quiet)
    assert output.read_text() == "precious"
    for _ in range(2):
        export(Checkpoint(store, manifest), output, force=True, progress=quiet)
        assert load_file(output).keys() == expected.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_damage_is_told_in_the_same_words_wherever_it_is(tmp_path):
    """An export and a restoring worker name the damaged file, and the kind of damage.

    Each damaged file has one flipped bit, in every ninth byte in turn, or another length, or zeros or ones only.
    """
    store = CheckpointStore(str(tmp_path / "run"))
    manifest = write(store, chain(TASK, [(0, 5)]), 0)
    file = tmp_path / "run" / manifest.place.part(3)
    good, seen = file.read_bytes(), set()
    bits = [good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :] for at in range(0, len(good), 9)]
    torn = [good[:length] for length in (0, 4, 8, 100, len(good) - 1)] + [good + b"x"]
    for number, damaged in enumerate([*bits, *torn, b"\0" * len(good), b"\xff" * len(good)]):
        file.write_bytes(damaged)
        output = tmp_path / f"out-{number}"
        with pytest.raises(CheckpointDamaged) as exported:
            export(Checkpoint(store, manifest), output, force=False, progress=quiet)
        with pytest.raises(CheckpointDamaged) as restored:
            read_layer(store, manifest, 3)
        assert str(exported.value) == str(restored.value)
        seen.add(str(exported.value).replace(f"{len(damaged)} bytes,", "? bytes,"))
    assert seen == {
        f"{file} has other contents than were written (its sha256 differs)",
        f"{file} has ? bytes, expected {len(good)}",
        f"{file} has more than {len(good)} bytes, expected {len(good)}",
    }
    file.unlink()
    with pytest.raises(CheckpointDamaged, match=f"^{file} is not there$"):
        export(Checkpoint(store, manifest), tmp_path / "out", force=False, progress=quiet)


def test_a_file_that_was_written_as_something_else_is_named(tmp_path):
    store = CheckpointStore(str(tmp_path))
    part = store.write_part(CheckpointId(0, "a"), 0, [b"no layer at all"])
    manifest = make_manifest(CheckpointId(0, "a"), [part])
    store.commit(manifest)
    with pytest.raises(CheckpointDamaged, match=r"layer-00000.safetensors: no safetensors file of a layer") as restored:
        read_layer(store, manifest, 0)
    with pytest.raises(CheckpointDamaged) as exported:
        export(Checkpoint(store, manifest), tmp_path / "out", force=False, progress=quiet)
    assert str(exported.value) == str(restored.value)


def test_an_output_that_cannot_be_is_named(trained, tmp_path, monkeypatch):
    store, manifest, _ = trained
    for output, message in (
        (tmp_path, "is a folder; expected the name of a file"),
        (tmp_path / "no" / "out", "its folder does not exist"),
    ):
        with pytest.raises(ExportError, match=message):
            export(Checkpoint(store, manifest), output, force=True, progress=quiet)
    monkeypatch.setattr("bamboo_trainer.checkpoint.export.shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(ExportError, match=r"are needed, and 10 B are free there"):
        export(Checkpoint(store, manifest), tmp_path / "out", force=True, progress=quiet)


def test_the_weights_in_a_runs_folder_are_named_to_who_names_the_folder(tmp_path):
    weights = tmp_path / "weights"
    weights.mkdir()
    save_file({"layers.0.weight": torch.ones(2)}, weights / "model.safetensors")
    with pytest.raises(ExportError) as told:
        open_source(str(tmp_path), None)
    expected = f"{tmp_path} has no checkpoints, expected those or a folder of weights, such as {weights}"
    assert str(told.value) == expected
    for url in (tmp_path / "absent", (tmp_path / "absent").as_uri()):
        with pytest.raises(ExportError, match=f"^there is no {tmp_path}/absent$"):
            open_source(str(url), None)


def test_the_weights_of_a_run_have_the_names_of_layers_and_are_not_replaced(trained, tmp_path):
    store, manifest, state = trained
    about = {"url": store.shown, "step": manifest.step, "folder": str(tmp_path / "weights")}
    assert export_weights(**about, id=manifest.attempt) == {}
    found = load_file(tmp_path / "weights" / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    assert "exists" in export_weights(**about, id=manifest.attempt)["problem"]
    assert "is not there" in export_weights(**about, id="other")["problem"]
    (tmp_path / "file").touch()
    told = export_weights(**{**about, "folder": str(tmp_path / "file" / "weights")}, id=manifest.attempt)["problem"]
    assert told == f"cannot write {tmp_path}/file/weights: Not a directory"


def test_a_number_that_safetensors_cannot_hold_is_refused(tmp_path):
    class Precise(nn.Linear):
        def __init__(self):
            super().__init__(2, 2)
            self.register_buffer("turns", torch.ones(2, dtype=torch.complex128))

    store = CheckpointStore(str(tmp_path / "run"))
    stage = build_stage(small_task(layers=(Precise,)), 0, [(0, 1)], CONFIG)
    manifest = write(store, [stage], 0)
    with pytest.raises(ExportError, match=r"layers.0.turns is of torch.complex128, which safetensors cannot hold"):
        export(Checkpoint(store, manifest), tmp_path / "out", force=False, progress=quiet)


def test_a_layer_of_another_step_or_place_is_damage(tmp_path):
    store = CheckpointStore(str(tmp_path))
    stages = chain(TASK, [(0, 5)])
    parts = [
        store.write_part(CheckpointId(7, "a"), n, encode(state)) for n, state in stages[0].values.layer_states().items()
    ]
    manifest = make_manifest(CheckpointId(7, "a"), parts)
    store.commit(manifest)
    with pytest.raises(CheckpointDamaged, match=r"layer-00000.safetensors: it is layer 0 of step 0"):
        export(Checkpoint(store, manifest), tmp_path / "out", force=False, progress=quiet)


@pytest.mark.slow
def test_memory_is_bounded_by_a_layer(tmp_path):
    """An export of 24 layers of 4 MiB takes less than 48 MiB more than the process has after an earlier export."""
    code = """
import resource, sys
from pathlib import Path
import torch
from bamboo_core.checkpoint.layout import CheckpointId
from bamboo_core.checkpoint.store import CheckpointStore
from bamboo_trainer.checkpoint.export import export
from bamboo_trainer.checkpoint.layer_file import encode
from bamboo_trainer.checkpoint.sources import Checkpoint, open_source
from bamboo_trainer.stage.layer_state import LayerState
from checkpoint_kit import make_manifest
store = CheckpointStore(sys.argv[1])
parts = []
for layer in range(24):
    name = f"parameter:{layer}.weight"
    state = LayerState(layer=layer, version=1, tensors={name: torch.full((1 << 20,), float(layer))}, scalars={},
                       names={"weight": name})
    parts.append(store.write_part(CheckpointId(1, "a"), layer, encode(state)))
manifest = make_manifest(CheckpointId(1, "a"), parts)
store.commit(manifest)
output = Path(sys.argv[1], "warm")
export(Checkpoint(store, manifest), output, force=False, progress=lambda *_: None)
def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
before, most = anonymous(), 0
def progress(done, of):
    global most
    most = max(most, anonymous())
export(Checkpoint(store, manifest), Path(sys.argv[1], "out"), force=False, progress=progress)
print((most - before) // 1024)
"""
    environment = {**os.environ, "PYTHONPATH": "tests/support"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 48  # MiB; all layers are 96


def command(*words):
    return [sys.executable, "-c", "from bamboo.cli.commands import main; main()", "export", *map(str, words)]


def test_the_command_exports_and_says_what(trained, tmp_path):
    store, _, expected = trained
    output = tmp_path / "out.safetensors"
    run = {"capture_output": True, "text": True, "timeout": 240, "check": False}
    done = subprocess.run(command(store.shown, "-o", output, "--quiet", "--step", 1), **run)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{output}: step 1, 5 layers, {len(expected)} tensors, ")
    assert load_file(output).keys() == expected.keys()
    again = subprocess.run(command(store.shown, "-o", output, "--quiet"), **run)
    assert (again.returncode, again.stdout, again.stderr) == (1, "", f"bamboo: {output} exists; force replaces it\n")


WAITS = """
import runpy, time
from bamboo_trainer.checkpoint import export
written = export.export
def wait(done, of):
    print("half written", flush=True)
    time.sleep(600)
export.export = lambda *given, **named: written(*given, **{**named, "progress": wait})
runpy.run_module("bamboo_trainer.offline", run_name="__main__", alter_sys=True)
"""


def test_a_signal_ends_an_export_and_leaves_nothing(trained, tmp_path):
    options = json.dumps({"format": "safetensors", "output": str(tmp_path / "out")})
    arguments = ["export", options, trained[0].shown]
    with subprocess.Popen([sys.executable, "-c", WAITS, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "half written\n"
        assert len(list(tmp_path.iterdir())) == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 130
    assert list(tmp_path.iterdir()) == []


def test_a_signal_to_the_command_ends_the_process_that_exports(tmp_path):
    (tmp_path / "waits.py").write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print('ended', flush=True), sys.exit(130)))\n"
        "print('begun', flush=True)\n"
        "time.sleep(600)\n"
    )
    code = (
        "from bamboo.local.trainer_calls import trainer_process; trainer_process.OFFLINE = 'waits'; "
        "from bamboo.cli.commands import main; "
        f"import sys; sys.argv[1:] = ['export', '{tmp_path}', '-o', 'x']; main()"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    with run as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "ended\n"
        assert process.wait(120) == 130
