"""The key `generation` of a language model's config; the texts are those of transformers' own `generate`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bamboo_trainer.models import gpt, gpt2, huggingface
from bamboo_trainer.models.parts.generating import open_generation
from bamboo_trainer.tasks.task_errors import TaskError
from manifest_kit import bamboojob, training
from training_job import Job
from transformers_kit import config_of, transformers

PROMPTS, TOKENS = [[1, 2, 3, 4], [5]], 9  # longer together than the data's sequences


@pytest.mark.parametrize(
    ("family", "padding"),
    [
        pytest.param("gpt2", False, marks=pytest.mark.slow),
        ("llama", True),
        pytest.param("mistral", False, marks=pytest.mark.slow),
        ("mamba2", True),
    ],
)
def test_texts_are_those_of_transformers(family: str, padding: bool) -> None:
    config = config_of(family, data={"padding": padding}, learningRate=0.002)
    config["generation"] = {"prompts": PROMPTS, "tokens": TOKENS}
    document = bamboojob(
        task={"entrypoint": "bamboo_trainer.models.huggingface:build", "config": config},
        training=training(24, 8, 4, generation={"everySteps": 24}),
        topology={"stages": 2},
    )
    job = Job(document).run()
    stages = [s.stage for node in job.nodes.values() for s in node.states.values() if s.stage and s.owned]
    weights = {k: tensor for stage in stages for k, tensor in stage.values.state_tensors().items()}
    named = {name.partition(".module.")[2]: tensor for name, tensor in weights.items()}
    model: Any = huggingface.make_model(huggingface.published_config(huggingface.read_settings(config)), "causal")
    assert not model.load_state_dict(named, strict=False).unexpected_keys
    model.eval()
    assert job.state.progress.texts is not None
    step, texts = job.state.progress.texts
    assert step == 24
    for prompt, text in zip(PROMPTS, texts, strict=True):
        settings = {"do_sample": False, "max_new_tokens": TOKENS, "eos_token_id": None, "pad_token_id": 0}
        given = torch.tensor([prompt])
        made = model.generate(given, attention_mask=torch.ones_like(given), **settings)[0].tolist()
        assert text.text.split() == list(map(str, made[len(prompt) :]))
    assert len(set(texts[0].text.split())) > 1


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Of a tokenizer of words."""
    tokenizers: Any = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["[UNK]", "<end>", "the", "cat", "sat"])}
    found = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    found.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=found, eos_token="<end>", unk_token="[UNK]")
    fast.save_pretrained(tmp_path)
    return str(tmp_path)


def test_prompts_are_texts_for_the_tokenizer_of_the_model_or_another_one(folder: str) -> None:
    config = {"prompts": ["the cat", "sat"]}
    for found in (open_generation(config, folder, 5), open_generation({**config, "tokenizer": folder}, None, 5)):
        assert found is not None
        assert (found.prompts, found.tokens, found.end) == ([[2, 3], [4]], 32, 1)
        assert found.decode([2, 3, 1]) == "the cat"
    with pytest.raises(ValueError, match=r"prompts\[1\]: token 4 is outside of the model's vocabulary of 4"):
        open_generation(config, folder, 4)


def test_bytes_are_tokens_of_our_own_gpt() -> None:
    found = gpt.build({"generation": {"prompts": ["é"], "tokens": 5}}).generation
    assert found is not None
    assert (found.prompts, found.decode([*"é".encode(), 255])) == ([[195, 169]], "é\N{REPLACEMENT CHARACTER}")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "generation.prompts: expected a list of texts, or of lists of token ids, got None"),
        ({"prompt": "a"}, "generation: unknown key 'prompt', expected some of prompts, tokens, temperature, tokenizer"),
        ({"prompts": ["a"]}, "generation.tokenizer: expected a tokenizer's folder, as the prompt 'a' is a text"),
        ({"prompts": ["a"], "tokenizer": "/nowhere"}, "generation.tokenizer: there is no folder /nowhere"),
        ({"prompts": ["a"], "tokenizer": 3}, "generation.tokenizer: expected a tokenizer's folder, or bytes, got 3"),
        ({"prompts": [[1, 0.5]]}, r"generation.prompts\[0\]: expected a text, or a list of token ids, got"),
        ({"prompts": [[]]}, r"generation.prompts\[0\]: expected at least one token"),
        ({"prompts": [[97]]}, r"generation.prompts\[0\]: token 97 is outside of the model's vocabulary of 97"),
        ({"prompts": [[1]], "tokens": 16}, "expected prompts and their new tokens of at most 16 tokens together"),
    ],
)
def test_what_cannot_be_is_told(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gpt2.build({"size": "tiny", "generation": config})


def test_models_that_are_not_causal_and_too_few_positions_are_refused() -> None:
    config = {"generation": {"prompts": [[1]], "tokens": 40}}
    with pytest.raises(ValueError, match="generation: expected only with objective causal"):
        huggingface.build(config_of("bert", **config))
    with pytest.raises(TaskError, match=r"generation: expected sequences of at most 32 tokens.*got 41"):
        huggingface.build(config_of("gpt2", **config))
