"""Shapes and types of layers' inputs, computed before any layer runs."""

from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from bamboo_trainer.stage.compilation import InputForm, input_forms
from stage_kit import CONFIG, at, small_gpt, small_task


class Counts(nn.Module):
    """A layer that reads values, which do not exist without data."""

    def forward(self, x: Tensor) -> Tensor:
        return x * float(x.sum())


def test_forms_are_those_of_a_real_forward(tmp_path: Path) -> None:
    hidden = InputForm((2, 8, 16), "float32", needs=True)
    task = small_gpt(tmp_path)
    assert input_forms(task, CONFIG, 4) == {
        0: (InputForm((2, 8), "int64", needs=False),),
        1: (hidden,),
        2: (hidden,),
        3: (hidden,),
    }
    assert input_forms(task, CONFIG, 2).keys() == {0, 1}
    rounded = at("bf16", boundary_precision="bf16")
    assert input_forms(task, rounded, 2)[1] == (hidden._replace(dtype="bfloat16"),)
    kept = at("bf16", parameter_precision="bf16")
    assert input_forms(task, kept, 2)[1] == (hidden._replace(dtype="bfloat16"),), "an embedding's rows are as it is"


def test_what_comes_after_a_layer_that_needs_data_is_not_known() -> None:
    task = replace(small_task(), layers=(lambda: nn.Linear(2, 3), Counts, nn.Tanh))
    assert input_forms(task, CONFIG, 3).keys() == {0, 1}
