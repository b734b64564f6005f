"""A stage's forward for the next token of a batch of prompts: nothing is kept or changed, and layers are in eval mode.

There is no cache of keys and values: each token takes a forward of the whole sequences.
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from bamboo_trainer.stage.evaluation import quiet_forward
from bamboo_trainer.stage.work import Work
from bamboo_trainer.task import Parts, Task, TextGeneration
from bamboo_trainer.tasks.generation import continuation, first_tokens, given_to_model, prompts_of, with_next_token
from bamboo_trainer.training import TrainingConfig

_FIRST_LAYER: Final = 0


class Generator:
    """Runs the layers of a stage, which are given to it by number. last: is it the last stage of the pipeline?"""

    def __init__(
        self, task: Task, config: TrainingConfig, layers: Mapping[int, nn.Module], device: torch.device, last: bool
    ) -> None:
        self._task, self._config, self._layers, self._device, self._last = task, config, layers, device, last

    def run(self, work: Work, version: int, batch: int, has: int, inputs: Parts | None) -> tuple[int, Parts]:
        """Goes on with a batch whose prompts have got so many tokens. How many they have then, and their tokens, behind
        which are the stage's outputs unless it is the last one.

        A pure function of the parameters and the batch. inputs: the same of the stage before, and None on a first stage
        that begins, or that is the last one, too.
        """
        said = self._task.generation
        assert said is not None
        tokens = inputs[0] if inputs else self._tokens(said, work, batch)
        prompts = prompts_of(said, batch, self._config.micro_batch_size)
        if has == said.tokens:  # the batch is done
            if self._last:
                rows = zip(prompts, tokens.tolist(), strict=True)
                work.texts |= {prompt: continuation(said, prompt, row) for prompt, row in rows}
            return has, (tokens,)
        given = given_to_model(said, tokens) if _FIRST_LAYER in self._layers else (inputs or ())[1:]
        place = ("generation", self._config.seed, version, batch, has)
        outputs = quiet_forward(self._layers, given, place, self._device, self._config.precision)
        if not self._last:
            return has, (tokens, *outputs)
        found = with_next_token(said, outputs, tokens, prompts, has, (self._config.seed, version))
        work.continued[batch] = found
        return has + 1, (found,)

    def _tokens(self, said: TextGeneration, work: Work, batch: int) -> Tensor:
        """Those of a batch whose tokens no other stage has sent."""
        known = work.continued.get(batch)
        return first_tokens(said, batch, self._config.micro_batch_size) if known is None else known
