"""Names of the Hub where a path is expected."""

import pytest

from bamboo_trainer.data.hub import nothing_there


@pytest.mark.parametrize("given", ["gpt2", "openai-community/gpt2", "Qwen/Qwen3-0.6B"])
def test_what_looks_like_a_name_on_the_hub_is_told_how_to_get_a_folder(given: str) -> None:
    said = nothing_there(given, "load(ID).save(FOLDER)")
    assert said.startswith(f"there is no folder {given}; it looks like a name on the Hugging Face Hub")
    assert f"load({given!r}).save({given.split('/')[-1]!r})" in said


@pytest.mark.parametrize("given", ["/data/gpt2", "./gpt2", "../gpt2", "a/b/c", "tokenizer.json", "a b", ""])
def test_a_path_is_just_not_there(given: str) -> None:
    assert nothing_there(given, "load(ID)", what="file") == f"there is no file {given}"
