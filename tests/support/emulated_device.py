"""A device whose copies to host memory take a while, without a GPU: one is there after so many questions."""

from collections.abc import Iterable, Sequence
from itertools import cycle

from torch import Tensor

from bamboo_trainer.memory.host_copies import AtOnce, Copy, Parts


class LateCopy:
    """Taken when it is started, as in the order of a GPU's stream, and hidden until it is ready."""

    def __init__(self, tensors: Iterable[Tensor], questions: int) -> None:
        self.questions, self.waited = questions, False
        self._parts = tuple(tensor.detach().clone() for tensor in tensors)

    def ready(self) -> bool:
        self.questions -= 1
        return self.questions < 0

    def wait(self) -> Parts:
        self.waited = self.questions >= 0
        return self._parts


class LateCopies(AtOnce):
    """questions: for each copy in turn. most: copies that were under way at once."""

    def __init__(self, questions: Sequence[int]) -> None:
        super().__init__()
        self._questions = cycle(questions)
        self.started: list[LateCopy] = []
        self.most = 0

    def start(self, tensors: Iterable[Tensor], *, bulk: bool = False) -> Copy:
        self.started.append(LateCopy(tensors, next(self._questions)))
        under_way = [copy for copy in self.started[-16:] if copy.questions >= 0 and not copy.waited]
        self.most = max(self.most, len(under_way))
        return self.started[-1]
