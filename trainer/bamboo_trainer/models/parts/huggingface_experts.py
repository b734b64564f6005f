"""The loss that balances a model's experts, as transformers computes it with `output_router_logits`.

It is a product of two means over all tokens and all routers of the model: how often an expert is chosen, and how
probable it is. (Fedus et al., Switch Transformers, 2021, equations 4 to 6; there of a single router.) So layers pass on
the sums of both, 2 numbers for each expert, and the product is taken behind the last one.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bamboo_trainer.task import Parts, add_loss

NAME = "router"  # of the loss in reports


class BalancedExperts:
    """The loss that balances the experts of a model of transformers.

    size: how many tensors layers pass on: [2 * experts + 1] in fp32, of how often each expert was chosen, how probable
    it was, and for how many tokens; and the mask of tokens that count, if the data have one.
    """

    def __init__(self, routers: Sequence[Any], experts: int, chosen: int, coefficient: float, *, masked: bool) -> None:
        """Create the loss. routers: transformers' `OutputRecorder`s of routers' results. chosen: experts for each
        token.
        """
        self._routers, self._experts, self._chosen, self._coefficient = routers, experts, chosen, coefficient
        self.size = 2 if masked else 1

    def begin(self, inputs: Parts) -> Parts:
        return (torch.zeros(2 * self._experts + 1, device=inputs[0].device), *inputs[1 : self.size])

    def watched(self, block: nn.Module) -> list[nn.Module]:
        return [module for name, module in block.named_modules() if self._recorder(name, module) is not None]

    def after(self, seen: list[tuple[nn.Module, object]], parts: Parts) -> Parts:
        sums, *mask = parts
        for module, returned in seen:
            recorder = self._recorder(None, module)
            logits = returned if isinstance(returned, Tensor) else returned[recorder.index]  # type: ignore[index]
            sums = sums + self._sums(logits, mask[0] if mask else None)
        return (sums, *mask)

    def end(self, parts: Parts) -> None:
        add_loss(self._coefficient * self.loss(parts[0]), NAME)

    def loss(self, sums: Tensor) -> Tensor:
        chosen, probable, tokens = torch.split(sums, [self._experts, self._experts, 1])
        return self._experts * torch.sum((chosen / tokens) * (probable / tokens))

    def _sums(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        """Return a router's sums: [2 * experts + 1].

        logits: [tokens, experts]. mask: [samples, length]; 0 for tokens that do not count.
        """
        probable = torch.softmax(logits.reshape(-1, self._experts), dim=-1)
        counts = torch.ones(len(probable), device=logits.device) if mask is None else mask.reshape(-1).float()
        picked = torch.topk(probable, self._chosen, dim=-1).indices
        chosen = torch.zeros_like(probable, dtype=torch.float32).scatter(1, picked, 1.0).detach()
        of_token = torch.cat([chosen, probable.float(), torch.ones_like(chosen[:, :1])], dim=1)
        return (of_token * counts.unsqueeze(1)).sum(0)

    def _recorder(self, name: str | None, module: nn.Module) -> Any:
        """Return transformers' recorder of that module, or None. name: within its block; None: it was found before."""
        fits = (r for r in self._routers if isinstance(module, r.target_class))
        return next((r for r in fits if name is None or r.layer_name is None or r.layer_name in name), None)


def balanced_experts(model: nn.Module, coefficient: float | None, *, masked: bool) -> BalancedExperts | None:
    """Return the loss that balances a model's experts, or None. coefficient: of the loss; None: the model's own, if its
    config has `output_router_logits: true`; 0: no loss.

    Raises ValueError for a model that has no such loss.
    """
    config: Any = model.config
    if coefficient is None and getattr(config, "output_router_logits", False):
        coefficient = next((c for c in (getattr(model, a, None) for a in _COEFFICIENTS) if c is not None), None)
        if coefficient is None:
            raise ValueError("output_router_logits: the model names no coefficient: say it as routerAuxLossCoef")
    if not coefficient:
        return None
    kind = type(model).__name__
    found = (getattr(model, "_can_record_outputs", None) or {}).get("router_logits")
    theirs = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    experts, chosen = getattr(model, "num_experts", None), getattr(model, "num_experts_per_tok", None)
    if found is None or theirs is None or experts is None or chosen is None:
        raise ValueError(f"routerAuxLossCoef: transformers has no loss that balances experts for a {kind}")
    routers = found if isinstance(found, list) else [found]
    made = BalancedExperts(routers, int(experts), int(chosen), float(coefficient), masked=masked)
    if not _agree(made, theirs, int(experts), int(chosen)):
        raise ValueError(f"routerAuxLossCoef: the loss that balances the experts of a {kind} is not known here")
    return made


_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")


def _agree(ours: BalancedExperts, theirs: Any, experts: int, chosen: int) -> bool:
    """Return whether both agree for some logits of two routers."""
    generator = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(6, experts, generator=generator) for _ in range(2))
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    sums = sum((ours._sums(one, mask) for one in logits), torch.zeros(2 * experts + 1))
    return torch.allclose(ours.loss(sums), torch.as_tensor(theirs(logits, experts, chosen, mask)), rtol=1e-5)
