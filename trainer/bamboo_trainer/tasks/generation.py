"""What a task says of generation, checked: which prompts a batch has, which token comes next, and the texts.

All of it is a function of the model's state and the job's seed, so a text depends neither on the grid nor on who was
lost while it was written. All sequences of a task are of one length and all batches have the same prompts on any grid,
since the bits of a forward depend on its shape.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from bamboo_core.history.records import MOST_PROMPT, MOST_PROMPTS, MOST_TEXT, Continuation
from bamboo_core.job.training_spec import TrainingSpec
from bamboo_core.text import shortened
from bamboo_trainer.data.order import pure_seed
from bamboo_trainer.task import Parts, Task, TextGeneration
from bamboo_trainer.tasks.task_errors import TaskError, in_task

MOST_TOKENS: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSchedule:
    """The schedule by which states write texts: after every so many steps, and after the last one."""

    every_steps: int
    batches: int  # of prompts
    tokens: int  # that each prompt gets
    steps: int  # of the job

    def round_of(self, version: int) -> tuple[int, int]:
        """How many batches of prompts the state that has seen so many steps continues, and by how many tokens."""
        due = version == self.steps or (version > 0 and version % self.every_steps == 0)
        return (self.batches, self.tokens) if due else (0, 0)


def generation_schedule(task: Task, training: TrainingSpec) -> GenerationSchedule | None:
    """The schedule of texts; None if the job does not ask for any. Raises TaskError if the task has not what it
    takes.
    """
    wanted = training.generation
    if wanted is None:
        return None
    said = task.generation
    if said is None:
        raise TaskError(
            "training.generation is set, but the task has no `generation`: no prompts, and nothing that makes text of "
            "tokens (models.gpt and causal models of transformers take it from task.config.generation)"
        )
    _check(said)
    batches = -(-len(said.prompts) // training.micro_batch_size)
    return GenerationSchedule(every_steps=wanted.every_steps, batches=batches, tokens=said.tokens, steps=training.steps)


def _check(said: Any) -> None:
    """Raises TaskError, naming the field and what was expected."""
    if not isinstance(said, TextGeneration):
        raise TaskError(f"generation is of type {type(said).__name__}, expected a bamboo_trainer.task.TextGeneration")
    prompts: Any = said.prompts
    if not isinstance(prompts, Sequence) or not 1 <= len(prompts) <= MOST_PROMPTS:
        found = len(prompts) if isinstance(prompts, Sequence) else type(prompts).__name__
        raise TaskError(f"generation.prompts: expected a list of 1 to {MOST_PROMPTS} prompts, got {found}")
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, Sequence) or not prompt or not all(_is_token(token) for token in prompt):
            raise TaskError(f"generation.prompts[{number}]: expected a list of token ids, at least one, none negative")
    if type(said.tokens) is not int or not 1 <= said.tokens <= MOST_TOKENS:
        raise TaskError(f"generation.tokens: expected a number from 1 to {MOST_TOKENS}, got {said.tokens!r}")
    is_number = isinstance(said.temperature, int | float) and math.isfinite(said.temperature)
    if not is_number or said.temperature < 0:
        raise TaskError(f"generation.temperature: expected a number of at least 0, got {said.temperature!r}")
    if not _is_token(said.padding) or not (said.end is None or _is_token(said.end)):
        raise TaskError("generation.padding and generation.end: expected token ids")


def _is_token(token: object) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and token >= 0


def prompts_of(said: TextGeneration, batch: int, size: int) -> range:
    """The numbers of the prompts in a batch of that size; the last batch may have fewer."""
    return range(batch * size, min((batch + 1) * size, len(said.prompts)))


def first_tokens(said: TextGeneration, batch: int, size: int) -> Tensor:
    """The prompts of a batch with room for what comes: int64 [prompts, length]."""
    length = max(map(len, said.prompts)) + said.tokens
    chosen = [said.prompts[prompt] for prompt in prompts_of(said, batch, size)]
    return torch.tensor([[*prompt, *[said.padding] * (length - len(prompt))] for prompt in chosen])


def given_to_model(said: TextGeneration, tokens: Tensor) -> Parts:
    """The inputs of the first layer. Raises TaskError."""
    with in_task("generation.inputs"):
        found: Any = said.inputs(tokens)
    if not isinstance(found, tuple) or not found or not all(isinstance(part, Tensor) for part in found):
        raise TaskError("generation.inputs: expected a tuple of tensors")
    return found


def logits_of(said: TextGeneration, outputs: Parts, tokens: Tensor) -> Tensor:
    """[prompts, length, vocabulary]. tokens: of which they are. Raises TaskError."""
    with in_task("generation.logits"):
        found: Any = said.logits(outputs)
    if isinstance(found, Tensor) and found.dim() == 3 and found.shape[:2] == tokens.shape and found.is_floating_point():
        return found
    shape, expected = list(found.shape) if isinstance(found, Tensor) else type(found).__name__, [*tokens.shape]
    raise TaskError(
        f"generation: expected logits of each of the tokens {expected}, [prompts, length, vocabulary], got {shape}; "
        "generation.logits takes them out of the last layer's outputs"
    )


def with_next_token(
    said: TextGeneration, outputs: Parts, tokens: Tensor, prompts: Sequence[int], has: int, place: tuple[int, int]
) -> Tensor:
    """The tokens of a batch of prompts with one more each. has: how many each has got already. place: the job's seed,
    and how many steps the state has seen. Raises TaskError.
    """
    ends = torch.tensor([len(said.prompts[prompt]) + has for prompt in prompts])
    logits = logits_of(said, outputs, tokens)
    rows = logits[torch.arange(len(prompts)), ends - 1].detach().to("cpu", torch.float64)
    found = tokens.to("cpu", copy=True)
    for row, (prompt, end) in enumerate(zip(prompts, ends.tolist(), strict=True)):
        found[row, end] = chosen(rows[row], said.temperature, pure_seed("generation", *place, prompt, has))
    return found


def chosen(logits: Tensor, temperature: float, seed: int) -> int:
    """The next token by its logits, fp64 [vocabulary]. Of equal ones the lowest id is the most likely. What is no
    number is the least likely of all.
    """
    known = torch.nan_to_num(logits, nan=torch.finfo(torch.float64).min)
    below = known - known.max()
    if temperature == 0:
        return int(torch.nonzero(below == 0)[0])
    shares = torch.softmax(below / temperature, 0).cumsum(0)
    drawn = torch.rand((), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * shares[-1]
    return min(int(torch.searchsorted(shares, drawn, right=True)), len(shares) - 1)


def continuation(said: TextGeneration, prompt: int, tokens: Sequence[int]) -> Continuation:
    """The text of a prompt that has got all its tokens. tokens: a row of its batch. Raises TaskError."""
    given = said.prompts[prompt]
    new = list(tokens[len(given) : len(given) + said.tokens])
    if said.end in new:
        new = new[: new.index(said.end)]
    return Continuation(prompt=_text(said, given, MOST_PROMPT), text=_text(said, new, MOST_TEXT))


def _text(said: TextGeneration, tokens: Sequence[int], most: int) -> str:
    with in_task("generation.decode"):
        text: Any = said.decode(list(tokens))
    if not isinstance(text, str):
        raise TaskError(f"generation.decode returned {type(text).__name__}, expected a string")
    return shortened(text.encode("utf-8", "replace").decode(), most)
