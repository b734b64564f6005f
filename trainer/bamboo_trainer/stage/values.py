"""A stage's parameters, buffers and optimizer state at one version, and the change to another version.

`StageValues` knows no forward, no backward, no peer and no clock. The next version must be a pure function of this one,
the step's final gradient and its commit, so that an owner and its replicas compute the same bits.

`FiniteState` checks the numbers that an optimizer's step leaves: parameters after each step, the optimizer's state when
it is copied, sent or digested, which reads all of it anyway. Without the check, a NaN could first show in the loss of a
later step, as if that step had caused it. After a step with a gradient that is not finite, nothing is checked.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec
import torch
from torch import Tensor, nn

from bamboo_core.control.evaluations import Course, EarlyStop
from bamboo_trainer import loss_scale
from bamboo_trainer.decisions import Committed
from bamboo_trainer.frames import Commit, CommonState
from bamboo_trainer.loss_scale import LossScale
from bamboo_trainer.memory.gpus import apart_from_others, wait_for
from bamboo_trainer.memory.host_copies import AtOnce, Copy, HostCopies
from bamboo_trainer.stage import checksums, layer_state
from bamboo_trainer.stage.checksums import Constants, checksum_of
from bamboo_trainer.stage.layer_state import LateCopies, LayerState
from bamboo_trainer.stage.optimizer_state import OptimizerState
from bamboo_trainer.stage.parameters import FlatParameters, tied_segments
from bamboo_trainer.task import Task
from bamboo_trainer.tasks.evaluation import committed_step, next_decided
from bamboo_trainer.tasks.mixed_precision import forget_casts
from bamboo_trainer.tasks.scheduled_optimizer import ScheduledOptimizer
from bamboo_trainer.tasks.task_errors import TaskError
from bamboo_trainer.tasks.ties import tie, tied_groups
from bamboo_trainer.tasks.user_code import build_layer
from bamboo_trainer.training import TrainingConfig

_WIDER: Final = frozenset({torch.float16, torch.bfloat16})  # types whose norm is taken in fp32


class FiniteState:
    """The check that a stage's state is finite. Asynchronous copies let `look` return before a step's result is here.

    Neither trained parameters nor the optimizer's state may have NaN. A parameter may have infinities if it had some
    when built, like a mask; the optimizer's state always may. Buffers and frozen parameters are not checked.
    """

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        parameters: FlatParameters,
        optimizer: ScheduledOptimizer,
        remembered: OptimizerState,
        copies: HostCopies,
    ) -> None:
        self._layers, self._parameters, self._copies = layers, parameters, copies
        self._optimizer, self._remembered = optimizer, remembered
        self._infinite = frozenset(s.name for s in parameters.slots if not _all_finite(s.parameter.detach()))
        self._pending: tuple[int, Copy] | None = None
        self._excused = False

    def look(self, step: int) -> None:
        """Start to check the parameters after a step, unless excused; raise TaskError if the check fails at once."""
        if self._excused:
            return
        tensors = [s.parameter.detach() for s in self._parameters.slots if s.name not in self._infinite]
        copy = self._copies.start((_norms(tensors),))
        self._pending = (step, copy)
        if copy.ready():
            self.confirm()

    def confirm(self) -> None:
        """Wait for the newest step's check, if one is pending. Raises TaskError if it fails."""
        if self._pending is None:
            return
        (step, copy), self._pending = self._pending, None
        (norms,) = copy.wait()
        if self._infinite or not bool(torch.isfinite(norms).all()):
            self._name_parameter(step)

    def gradient_was_not(self) -> None:
        """Excuse the state from checks until `forget`: a step's gradient was not finite, which is reported instead."""
        self._excused = True

    def forget(self) -> None:
        """Forget a pending check, and resume checks after `gradient_was_not`, since the state was replaced."""
        self._pending, self._excused = None, False

    def check_all(self, version: int) -> None:
        """Raise TaskError if the pending check fails or, unless excused, the optimizer's state has NaN at `version`."""
        self.confirm()
        if self._excused:
            return
        named = [(name, t.detach()) for name, t in self._remembered.named() if t.is_floating_point() and t.numel()]
        if not _have_finite_norms([tensor for _, tensor in named]):
            for name, tensor in named:
                if bool(torch.isnan(tensor).any()):
                    slot, _, key = name.partition(":")[2].rpartition(":")
                    of = layer_state.in_words(self._layers, f"parameter:{slot}")
                    raise TaskError(f"{self._who()} remembers NaN as {key!r} of {of} after step {version}")

    def _name_parameter(self, step: int) -> None:
        """Raise TaskError for a parameter with NaN or a forbidden infinity; its norm may overflow without either."""
        for slot in self._parameters.slots:
            values = slot.parameter.detach()
            wrong = torch.isnan(values).any() if slot.name in self._infinite else not _all_finite(values)
            if bool(wrong):
                of = layer_state.in_words(self._layers, f"parameter:{slot.name}")
                rate = self._optimizer.learning_rate(step)
                raise TaskError(
                    f"{self._who()} left numbers in {of} that are not finite, in step {step + 1} (rate {rate:g})"
                )

    def _who(self) -> str:
        return f"the optimizer ({type(self._optimizer.inner).__name__})"


def _have_finite_norms(tensors: Iterable[Tensor]) -> bool:
    """Return whether all tensors' norms are finite. Tensors may be on several devices, as step counts on the host."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    return all(bool(torch.isfinite(_norms(group)).all()) for group in by_device.values())


def _norms(tensors: Iterable[Tensor]) -> Tensor:
    """Return the norms of tensors on one device: fp64 [tensors], grouped by dtype, not in the tensors' order. A norm is
    finite only if all elements of its tensor are.
    """
    by_kind: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault(tensor.dtype, []).append(tensor)
    norms = [
        norm.double()
        for dtype, group in by_kind.items()
        for norm in torch._foreach_norm(group, 2, torch.float32 if dtype in _WIDER else None)
    ]
    return torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float64)


def _all_finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values).all())


MOST_SUMS: Final = 1024  # reported for a stage, in a message of some tens of KB


class StageValues:
    """The parameters, buffers and optimizer state of a stage's layers.

    index: the stage's number. first, end: its layers, a half-open range. last: this is the last stage of the model.
    version: the step that the values are ready for. layers: the modules, by number. parameters: their tensors.
    optimizer: its state. common: the state that belongs to no layer.

    size: elements of a final gradient, which `apply` takes. gradient_size: elements of a gradient in which each layer's
    use of a tied parameter is still separate. buckets: ranges of these elements, in the order a backward ends them.
    tied: the tied groups whose layers' gradients this stage sums, in order.
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
        self.size, self.gradient_size = self.parameters.size, self.parameters.gradient_size
        self.buckets = tuple(bucket.place for bucket in self.parameters.buckets)
        self.tied = tied_segments(self.parameters, groups, stages)
        self._elsewhere = frozenset(one.group for one in self.tied if min(one.stages) != stage)  # in another's norms
        named = [(slot.name, slot.parameter) for slot in self.parameters.slots]
        self._scheduled = ScheduledOptimizer(task, named)
        self.optimizer = OptimizerState(self.parameters, self._scheduled)
        self._begin_with(CommonState())
        self._finite = FiniteState(self.layers, self.parameters, self._scheduled, self.optimizer, copies)
        checksums.check(self.parameters, self.optimizer)
        running = {(layer, norm.place(name)) for layer, norm, _ in self.parameters.norms for name in norm.names}
        self._constants = Constants(self.layers, running)
        self._parked = False

    # from version to version

    def apply(self, gradient: Tensor, norm: float, *, scale: float = 1.0, tries: bool = False) -> None:
        """Take one optimizer step with the final gradient, [size], and add its sums to norms' running statistics.

        The gradient is not modified. norm: the global gradient's, for clipping. scale: multiplies the gradient. tries:
        compare with a rebuilt optimizer, if possible; raises NotDeterministic if its bits differ. Raises TaskError.
        A parameter that is unused, or frozen by a decision, gets no gradient (None).
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
            checksums.check(self.parameters, self.optimizer)
        self.version += 1

    def squared_norms(self, gradient: Tensor) -> Tensor:
        """Return the squared norm of each parameter's final gradient, without the loss scale: fp64 [parameters]. A tied
        parameter counts only on its lowest stage; parameters that a decision has frozen are left out.
        """
        own = [slot for slot in self.parameters.slots if slot.group not in self._elsewhere]
        slots = [slot for slot in own if slot.name not in self.optimizer.frozen]
        squares = [slot.of(gradient).double().square_().sum() for slot in slots]
        unscale = self.optimizer.unscale
        return torch.stack(squares) * unscale**2 if squares else gradient.new_empty(0, dtype=torch.float64)

    def allow_commit(self) -> None:
        """Raise TaskError if the step at this version must not be committed: its learning rate or another schedule's
        value is invalid, or the check of the parameters after the newest step (`FiniteState`) fails.
        """
        self._scheduled.settings(self.version)
        self._finite.confirm()

    def skip(self) -> None:
        """Go to the next version with the values unchanged, since the commit skips the step."""
        self._constants.check()
        self._finite.confirm()
        self.parameters.unbind()
        forget_casts()
        self.version += 1

    def learning_rate(self, step: int) -> float:
        """Return the task's learning rate at a step, equal on every stage, times the factor that decisions set."""
        return self._scheduled.learning_rate(step)

    def ends(self, evaluation: Mapping[str, float]) -> EarlyStop | None:
        """Return the early stop if a decision, or this state's evaluation, makes this state the last one; else None."""
        common, course = self.common, self._course_with(evaluation)
        if self.config.early and course.is_over(self.config.early):
            return EarlyStop(best=course.state, without=course.without)
        return EarlyStop(by=common.decided.stops[0]) if common.decided and common.decided.stops else None

    def common_after(self, commit: Commit) -> CommonState:
        """Return the common state (`CommonState`) after the step that begins at this version. Raises TaskError."""
        common, finite = self.common, not commit.skipped or math.isfinite(commit.norm)
        return msgspec.structs.replace(
            common,
            loss_scale=common.loss_scale.after(finite=finite) if common.loss_scale else None,
            decided=next_decided(self.task, common.decided, committed_step(self.version + 1, commit)),
            course=self._course_with(commit.evaluation),
        )

    def _course_with(self, evaluation: Mapping[str, float]) -> Course:
        if self.config.early is None or not evaluation:
            return self.common.course
        return self.common.course.after(self.config.early, self.version, evaluation)

    def begin_step(self, common: CommonState) -> None:
        """Set the common state (`CommonState`) for the step that begins at this version."""
        self.common = common
        self.optimizer.obey(common)

    def _begin_with(self, common: CommonState) -> None:
        """Set the common state (`CommonState`), without parts that the job does not use. Missing parts get their first
        values, as does the course of evaluations if the job's metric or its goal differs. Raises TaskError.
        """
        config = self.config
        metric = f"{config.early.goal} {config.early.metric}" if config.early else ""
        decided = common.decided if self.task.decisions else None
        self.begin_step(
            CommonState(
                loss_scale=(common.loss_scale or LossScale(loss_scale.INITIAL)) if config.scales_losses else None,
                decided=decided or next_decided(self.task, None, Committed(step=self.version)),
                course=common.course if common.metric == metric else Course(),
                metric=metric,
            )
        )

    def park(self, parked: bool) -> None:
        """Keep the optimizer's state in host memory between steps if `parked`, else on the device."""
        if parked and not self._parked:
            self.optimizer.park()
            wait_for(self.device)  # the copies are in progress
        elif self._parked and not parked:
            self.optimizer.fetch(self.device)
        self._parked = parked

    # copying and restoring

    def layer_states(self, only: Collection[int] | None = None, *, shown: bool = True) -> dict[int, LayerState]:
        """Return copies of these layers' states, by number; by default, of the stage's own layers. For a layer of
        another stage, copy only tied parameters that this stage also has, and their optimizer state. Raises TaskError.

        shown: for own layers, include the names of all entries of the state_dict, and the values of entries outside
        the training state, so that a reader can rebuild the state_dict.
        """
        return self._taken(self.layers if only is None else only, shown=shown)

    def late_copies(self, only: Collection[int]) -> LateCopies:
        """Return copies of these layers' states; complete them before the state changes. Raises TaskError."""
        return LateCopies(self._taken(only, late=LateCopies.KINDS))

    def _taken(
        self, wanted: Collection[int], *, shown: bool = True, late: tuple[str, ...] = ()
    ) -> dict[int, LayerState]:
        self._finite.check_all(self.version)
        held = self.layers, self.parameters, self.optimizer, self.version, self.common
        return layer_state.take(wanted, *held, shown=shown, late=late)

    def layers_needed(self) -> tuple[int, ...]:
        """Return the layers whose states `restore` needs (see `layer_state.needed`)."""
        return layer_state.needed(self.layers, self.parameters)

    def restore(self, states: Mapping[int, LayerState]) -> None:
        """Restore values from layers' states of any split. Raises ValueError, before any change, if they do not fit."""
        self.version = layer_state.restore(self.layers, self.parameters, self.optimizer, states)
        self._begin_with(states[self.first].common)
        self._finite.forget()
        self._constants.renew()
        forget_casts()
        if self._parked:
            self.optimizer.park()

    # digests and checksums

    def digest(self) -> str:
        """Return a digest of the parameters, buffers and optimizer state, without tied parameters that another stage
        includes. The model's digest is the sum of all stages' digests, independent of the split (`add_digests`). A
        frozen tied parameter counts in the stage that has the layer of its group's first name.
        """
        trained = {slot.name for slot in self.parameters.slots if slot.group in self._elsewhere}
        frozen = {
            name for name in self.parameters.constants if int(name.partition(".")[0]) not in range(self.first, self.end)
        }
        self._finite.check_all(self.version)
        return checksums.digest(self.parameters, self.optimizer, trained | frozen)

    def checksums(self) -> dict[str, int]:
        """Return a 64-bit checksum of each tensor (of each layer if there are more than MOST_SUMS tensors) and of the
        optimizer's numbers, by name for messages. Equal states have equal ones. Raises TaskError if a constant changed.
        """
        self._constants.check(bits=True)
        sums = checksums.checksums(self.parameters, self.optimizer)
        numbers = {f"the optimizer's numbers of layers {self.first} to {self.end - 1}": sums.pop(checksums.NUMBERS)}
        if len(sums) <= MOST_SUMS:
            return {layer_state.in_words(self.layers, name): total for name, total in sums.items()} | numbers
        by_layer: dict[int, list[int]] = {}
        for name, total in sums.items():
            by_layer.setdefault(layer_state.layer_of(name), []).append(total)
        return {f"layer {layer}": checksum_of((), total) for layer, total in by_layer.items()} | numbers
