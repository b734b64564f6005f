"""Compare models of transformers with the same models split into layers for Bamboo (`make architectures`).

The results become the table in docs/huggingface.md. The comparison needs transformers and takes a minute. Each family
has the small size of the tests. Raises AssertionError if logits differ, or if gradients differ by 1e-5 or more.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests" / "support"))

from bamboo_trainer.checkpoint.export import export  # noqa: E402
from bamboo_trainer.checkpoint.sources import TensorFiles  # noqa: E402
from bamboo_trainer.models import huggingface  # noqa: E402
from bamboo_trainer.models.sequences import Objective, positions_in  # noqa: E402
from bamboo_trainer.task import Task, Weighted  # noqa: E402
from from_module_kit import layers_of, run, state_of  # noqa: E402
from transformers_kit import FAMILIES, LENGTH, WORDS, config_of, transformers  # noqa: E402

PAGE = ROOT / "docs" / "huggingface.md"
BEGIN, END = "<!-- made by `make architectures` -->\n", "<!-- end -->\n"
DOCUMENTS = torch.tensor([[0] * 5 + [1] * (LENGTH - 5), [0] * LENGTH])
YES, NO = "yes", ""


def main() -> None:
    version = ".".join(transformers.__version__.split(".")[:2])
    lines = [
        f"transformers {version}; logits, with and without padding, are the same bits.\n",
        "| `model_type` | Objective | Gradients differ by at most | Documents kept apart | Round trip |",
        "| --- | --- | --- | --- | --- |",
        *(row(family) for family in FAMILIES),
    ]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"{PAGE.name} lacks the comments between which the table belongs"
    PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after)


def row(family: str) -> str:
    print(family, flush=True)
    config = config_of(family)
    model = huggingface.NamedModel.read(config)
    largest = max(compared(config_of(family, data={"padding": padding}), model.objective) for padding in (False, True))
    packs = YES if family in huggingface.PACKS and apart(config) else NO
    trip = YES if goes_round(config) else NO
    return f"| `{family}` | `{model.objective}` | {f'{largest:.0e}' if largest else '0'} | {packs} | {trip} |"


def compared(config: dict[str, Any], objective: Objective) -> float:
    """Assert that layers and model have equal logits, and gradients within 1e-5; return their largest difference."""
    task = huggingface.build(config)
    layers, model = both(task, config)
    inputs, (target,) = task.dataset.batch([1, 5, 7])
    mask = inputs[1] if len(inputs) > 1 else None
    labels = {"labels": target} | ({"shift_labels": target} if objective == "causal" else {})
    theirs = model(input_ids=inputs[0], attention_mask=mask, **labels)
    (logits,) = run(layers, inputs)
    counts = mask.bool() if mask is not None else slice(None)
    assert torch.equal(logits[counts], theirs.logits[counts]), (config, "logits")
    weighted = task.loss((logits,), (target,))
    assert isinstance(weighted, Weighted)
    torch.autograd.backward(weighted.total / weighted.weight)
    torch.autograd.backward(theirs.loss)
    ours = {k.removeprefix("module."): p.grad for layer in layers for k, p in layer.named_parameters()}
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    differences = [float((own(ours[name]) - gradient).abs().max()) for name, gradient in wanted.items()]
    assert max(differences) < 1e-5, (config, "gradients", max(differences))
    assert sum(bool(gradient.any()) for gradient in wanted.values()) > len(wanted) // 2, (config, "no gradients")
    return max(differences)


def own(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


def apart(config: dict[str, Any]) -> bool:
    """Return whether the second document of a packed sequence gets nearly the same logits as it gets alone."""
    model = huggingface.NamedModel.read(config).make().eval()
    ids = torch.randint(1, WORDS, DOCUMENTS.shape, generator=torch.Generator().manual_seed(1))
    logits = model(input_ids=ids, position_ids=positions_in(DOCUMENTS), use_cache=False).logits
    alone = model(input_ids=ids[:1, 5:], use_cache=False).logits
    return torch.allclose(logits[:1, 5:], alone, rtol=1e-4, atol=1e-6)


def goes_round(config: dict[str, Any]) -> bool:
    """Return whether the exported model, loaded with `from_pretrained`, gives exactly the layers' logits."""
    task = huggingface.build(config)
    layers = layers_of(task)
    inputs, _ = task.dataset.batch([3, 4])
    auto = getattr(transformers, huggingface.AUTO[huggingface.NamedModel.read(config).objective][0])
    with tempfile.TemporaryDirectory() as name:
        kept, output = Path(name) / "weights", Path(name) / "model"
        kept.mkdir()
        state = {f"layers.{n}.{k}": t.clone() for n, layer in enumerate(layers) for k, t in layer.state_dict().items()}
        save_file(state, kept / "model.safetensors")
        source = TensorFiles([kept / "model.safetensors"])
        export(source, output, force=False, progress=lambda *_: None, task_config=config)
        model = auto.from_pretrained(output, local_files_only=True)
    for module in (*layers, model):
        module.eval()
    return torch.equal(run(layers, inputs)[0], model(input_ids=inputs[0]).logits)


def both(task: Task, config: dict[str, Any]) -> tuple[list[nn.Module], nn.Module]:
    """Return the layers and the whole model, with the same weights, in eval mode."""
    layers = layers_of(task)
    model = huggingface.NamedModel.read(config).make()
    assert not model.load_state_dict(state_of(layers), strict=False).missing_keys
    for module in (*layers, model):
        module.eval()
    return layers, model


if __name__ == "__main__":
    main()
