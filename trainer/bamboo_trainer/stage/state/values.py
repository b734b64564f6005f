"""A stage's parameters, buffers and optimizer state at one version, and the change to another version.

Knows no forward, no backward, no peer and no clock. The next version is a pure function of this one and of the step's
final gradients, so an owner and its replicas come to the same bits.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from bamboo_core.control.evaluations import EarlyStop
from bamboo_trainer.frames.payloads import Commit, CommonState
from bamboo_trainer.memory.host_copies import AtOnce, HostCopies
from bamboo_trainer.memory.placement import apart_from_others, wait_for
from bamboo_trainer.stage.checksums import checksum_of
from bamboo_trainer.stage.constants import Constants
from bamboo_trainer.stage.state import common_state, layer_state, state_digests
from bamboo_trainer.stage.state.final_gradients import FinalGradients
from bamboo_trainer.stage.state.finite import FiniteState
from bamboo_trainer.stage.state.late_copies import LateCopies
from bamboo_trainer.stage.state.layer_state import LayerState
from bamboo_trainer.stage.state.optimizer_state import OptimizerState
from bamboo_trainer.stage.state.parameters import FlatParameters, tied_segments
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.mixed_precision import forget_casts
from bamboo_trainer.tasks.scheduled_optimizer import ScheduledOptimizer
from bamboo_trainer.tasks.ties import tie, tied_groups
from bamboo_trainer.tasks.user_code import build_layer
from bamboo_trainer.training import TrainingConfig

MOST_SUMS: Final = 1024  # reported for a stage, in a message of some tens of KB


class StageValues:
    """The parameters, buffers and optimizer state of a stage's layers.

    index: the stage's number. first, end: its layers, a half-open range. last: it is the last stage of the model.
    version: the step that the values are ready for. layers: the modules, by number. parameters: their tensors.
    optimizer: its state. common: the state that belongs to no layer. final: the form of the final gradients that
    `apply` takes.
    """

    def __init__(
        self,
        task: Task,
        stage: int,
        stages: Sequence[tuple[int, int]],
        config: TrainingConfig,
        device: torch.device | str = "cpu",
        copies: HostCopies | None = None,
    ) -> None:
        """Build the values before the first step.

        stages: the layers of all stages, half-open ranges. copies: bring received tensors to the device.
        """
        self.version = 0
        self.task, self.config, self.index, self.device = task, config, stage, torch.device(device)
        copies = copies or AtOnce(self.device)
        self._bring = copies.bring
        self.first, self.end = stages[stage]
        self.last = stage == len(stages) - 1
        built = {i: build_layer(task, config.seed, i) for i in range(self.first, self.end)}
        self.layers = apart_from_others(built, self.device, rounds=config.parameter_dtype is not torch.float32)
        groups = tied_groups(task)
        shared = tie(self.layers, groups, task, config.seed, apart=True)
        self.parameters = FlatParameters(self.layers, shared, self.device, config.parameter_dtype)
        tied = tied_segments(self.parameters, groups, stages)
        self._elsewhere = frozenset(one.group for one in tied if min(one.stages) != stage)  # reported by another stage
        named = [(slot.name, slot.parameter) for slot in self.parameters.slots]
        self._scheduled = ScheduledOptimizer(task, named)
        self.optimizer = OptimizerState(self.parameters, self._scheduled)
        self._begin_with(CommonState())
        self._finite = FiniteState(self.layers, self.parameters, self._scheduled, self.optimizer, copies)
        state_digests.check(self.parameters, self.optimizer)
        running = {(layer, norm.place(name)) for layer, norm, _ in self.parameters.norms for name in norm.names}
        self._constants = Constants(self.layers, running)
        self.final = FinalGradients(self.parameters, self.optimizer, tied, self._elsewhere)
        self._parked = False
        self._digest: str | None = None

    # from version to version

    def apply(self, gradient: Tensor, norm: float, *, scale: float = 1.0, tries: bool = False) -> None:
        """Take one optimizer step with the final gradient (not modified) times scale, and add the sums in it to the
        norms' running statistics. norm: of the global gradient. tries: compare with a rebuilt optimizer; raises
        NotDeterministic if its bits differ.

        A parameter that no microbatch has used, or that a decision has frozen, stays unchanged, with its optimizer
        state.
        """
        forget_casts()  # an update needs no casts and no sums, and may need their memory
        self.parameters.unbind()
        self._constants.check()
        self._finite.confirm()
        reached, frozen = self.parameters.used(gradient), self.optimizer.frozen
        used = [mark and slot.name not in frozen for slot, mark in zip(self.parameters.slots, reached, strict=True)]
        ready = self._bring([gradient])[0].to(torch.float32)
        limit = self.config.max_gradient_norm
        scale *= self.optimizer.unscale * (1.0 if limit is None else min(1.0, limit / (norm + 1e-6)))
        if ready is not gradient:
            ready *= scale
        elif scale != 1.0 or not self._scheduled.only_reads:
            ready = ready * scale  # a copy: an optimizer may write to its gradients
        self.parameters.bind_final(ready, used)
        if self._parked:
            self.optimizer.fetch(self.device)
        trial = self.optimizer.trial(self.version) if tries else None
        self._scheduled.step(self.version)
        if trial:
            trial.compare(self.version)
        if not math.isfinite(norm):
            self._finite.gradient_was_not()
        self._finite.look(self.version)
        if self._parked:
            self.optimizer.park()
            wait_for(self.device)
        self.parameters.unbind()
        for place in self.parameters.norms:
            place.norm.add(place.of(gradient))
        self._constants.renew_running()
        forget_casts()
        if not self.optimizer.fixed:  # each parameter's state appears with the first step that uses it
            state_digests.check(self.parameters, self.optimizer)
        self._digest = None
        self.version += 1

    def allow_commit(self) -> None:
        """Check, before the step at this version may be committed, that its rates are usable and that the step before
        left finite parameters. Raises TaskError.
        """
        self._scheduled.settings(self.version)
        self._finite.confirm()

    def skip(self) -> None:
        """Go to the next version without applying the step."""
        self._constants.check()
        self._finite.confirm()
        self.parameters.unbind()
        forget_casts()
        self._digest = None
        self.version += 1

    def learning_rate(self, step: int) -> float:
        """Return the task's learning rate, equal on every stage, with the decisions for the next step."""
        return self._scheduled.learning_rate(step)

    def ends(self, evaluation: Mapping[str, float]) -> EarlyStop | None:
        """Return the early stop if this state, with this evaluation, is the last one."""
        return common_state.ending(self.common, self.config, self.version, evaluation)

    def common_after(self, commit: Commit) -> CommonState:
        """Return the state that belongs to no layer after the step that begins here."""
        return common_state.after(self.common, self.task, self.config, self.version, commit)

    def begin_step(self, common: CommonState) -> None:
        """Set the state that belongs to no layer for the step that begins at this version."""
        self.common = common
        self.optimizer.obey(common)

    def _begin_with(self, common: CommonState) -> None:
        self.begin_step(common_state.fitted(common, self.task, self.config, self.version))

    def park(self, parked: bool) -> None:
        """Keep the optimizer's state in host memory between steps, or stop doing so."""
        if parked and not self._parked:
            self.optimizer.park()
            wait_for(self.device)  # the copies are in progress
        elif self._parked and not parked:
            self.optimizer.fetch(self.device)
        self._parked = parked

    # copying and restoring

    def layer_states(self, only: Collection[int] | None = None, *, shown: bool = True) -> dict[int, LayerState]:
        """Return copies of the state of these layers, by number; of the stage's own if None. A layer of another stage
        has only the tied parameters that this stage has too.

        shown: include entries of the layers' state_dict that are no state, for its readers.
        """
        return self._taken(self.layers if only is None else only, shown=shown)

    def late_copies(self, only: Collection[int]) -> LateCopies:
        """Return copies of these layers' state, made piece by piece; they must be done before the state changes."""
        return LateCopies(self._taken(only, late=LateCopies.KINDS))

    def _taken(
        self, wanted: Collection[int], *, shown: bool = True, late: tuple[str, ...] = ()
    ) -> dict[int, LayerState]:
        self._finite.check_all(self.version)
        held = self.layers, self.parameters, self.optimizer, self.version, self.common
        return layer_state.take(wanted, *held, shown=shown, late=late)

    def layers_needed(self) -> tuple[int, ...]:
        """Return the layers that `restore` needs: the stage's own, and the owners of tied parameters."""
        return layer_state.needed(self.layers, self.parameters)

    def restore(self, states: Mapping[int, LayerState]) -> None:
        """Restore states of any split; raises ValueError, with nothing changed, if they do not fit this stage."""
        self.version = layer_state.restore(self.layers, self.parameters, self.optimizer, states)
        self._begin_with(states[self.first].common)
        self._digest = None
        self._finite.forget()
        self._constants.renew()
        forget_casts()
        if self._parked:
            self.optimizer.park()

    def state_tensors(self) -> dict[str, Tensor]:
        """Return copies by "layers.<layer>.<name>": parameters (tied ones by every name) and persistent buffers."""
        return {
            f"layers.{index}.{name}": tensor.detach().to("cpu", copy=True)
            for index, layer in self.layers.items()
            for name, tensor in layer.state_dict().items()
        }

    # digests and checksums

    def digest(self) -> str:
        """Return a digest of parameters, buffers and optimizer state; equal digests mean bit-equal state. Computed once
        for each version: it reads the whole state, and every announcement needs it.
        """
        if self._digest is None:
            self._finite.check_all(self.version)
            self._digest = state_digests.digest(self.parameters, self.optimizer)
        return self._digest

    def share_of_digest(self) -> str:
        """Return the digest without tied parameters that another stage includes. The model's digest is the sum of all
        stages' shares, independent of the split (`add_digests`). The stage of its first layer includes a frozen one.
        """
        trained = {slot.name for slot in self.parameters.slots if slot.group in self._elsewhere}
        frozen = {
            name for name in self.parameters.constants if int(name.partition(".")[0]) not in range(self.first, self.end)
        }
        elsewhere = frozenset(trained | frozen)
        self._finite.check_all(self.version)
        return state_digests.digest(self.parameters, self.optimizer, elsewhere) if elsewhere else self.digest()

    def checksums(self) -> dict[str, int]:
        """Return checksums of the whole state, by each tensor's name in messages; by layer if there are more than
        MOST_SUMS tensors. Equal for all holders of the stage. Raises TaskError if a buffer has changed.
        """
        self._constants.check(bits=True)
        sums = state_digests.checksums(self.parameters, self.optimizer)
        numbers = {f"the optimizer's numbers of layers {self.first} to {self.end - 1}": sums.pop(state_digests.NUMBERS)}
        if len(sums) <= MOST_SUMS:
            return {layer_state.in_words(self.layers, name): total for name, total in sums.items()} | numbers
        by_layer: dict[int, list[int]] = {}
        for name, total in sums.items():
            by_layer.setdefault(layer_state.layer_of(name), []).append(total)
        return {f"layer {layer}": checksum_of((), total) for layer, total in by_layer.items()} | numbers
