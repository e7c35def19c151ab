"""Batch norm over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from deuteron.errors import BindError


class _Gathered(torch.autograd.Function):
    """Gathers the rows of all ranks in order. The gradient of a row is summed over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, group: str) -> Tensor:
        ctx.ranks, ctx.group = ranks, group
        calls = torch.ops._c10d_functional
        result: Tensor = calls.wait_tensor(calls.all_gather_into_tensor(x, ranks, group))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        calls = torch.ops._c10d_functional
        given = grads[0].contiguous(), "sum", ctx.ranks, ctx.group
        return calls.wait_tensor(calls.reduce_scatter_tensor(*given)), None, None


class SyncBatchNorm(_BatchNorm):
    """``torch.nn.SyncBatchNorm`` that works on a CPU as well: the statistics are those of all ranks
    together.

    Each rank computes the mean and the squared deviations of its own part. One gather brings these
    and the counts of all ranks together, and they are merged without ever subtracting large sums
    from one another. Parts may be of different sizes. In evaluation mode, and where a process
    trains alone, it is the usual batch norm. It takes input of any rank from 2 on, and its state
    dict is that of batch norm.

    >>> model = dt.nn.SyncBatchNorm.convert(model)  # every batch norm in it
    """

    # not derived from torch's, which DistributedDataParallel refuses on a CPU
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        given: Any = {"device": device, "dtype": dtype}
        given |= {} if bias else {"bias": False}  # which torch knows from 2.13 on
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **given)
        self.process_group = process_group

    @classmethod
    def convert(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """Return ``module`` with every batch norm in it, torch's synchronised one too, replaced by
        one of these with the same parameters and statistics. If ``module`` is a batch norm itself,
        return the one that replaces it."""
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            if getattr(module, "activation", None) is not None:
                wrong = f"a {cls.__name__} has no activation {module.activation!r}"
                remedy = f"make the {type(module).__name__} without one, and put it behind that"
                raise BindError(wrong, asked=f"{cls.__name__}.convert(…)", remedy=remedy)
            kept = (module.num_features, module.eps, module.momentum, module.affine)
            made = cls(*kept, module.track_running_stats, process_group)
            made._parameters, made._buffers = module._parameters, module._buffers
            return made.train(module.training)
        for name, child in module.named_children():
            setattr(module, name, cls.convert(child, process_group))
        return module

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        live = self.training or self.running_mean is None
        if not (live and dist.is_available() and dist.is_initialized()):
            return super().forward(input)
        group: Any = self.process_group or dist.group.WORLD
        ranks = dist.get_world_size(group)
        if ranks == 1:
            return super().forward(input)
        self._check_input_dim(input)
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        axes = [0, *range(2, input.dim())]
        column = (1, -1, *(1 for _ in axes[1:]))
        channels, own = input.shape[1], input.numel() // max(input.shape[1], 1)
        mean = wide.sum(axes) / max(own, 1)
        squares = (wide - mean.view(column)).square().sum(axes)
        parts = torch.cat([mean, squares, mean.new_full((1,), float(own))])
        gather: Any = _Gathered.apply
        every: Tensor = gather(parts[None], ranks, group.group_name)
        means, spreads, counts = every.split([channels, channels, 1], dim=1)
        total = counts.sum().clamp(min=1.0)
        mean = (means * counts).sum(0) / total
        squares = (spreads + counts * (means - mean).square()).sum(0)
        if self.training and self.track_running_stats:
            self._remember(mean.detach(), squares.detach(), total.detach())
        factor = torch.rsqrt(squares / total + self.eps)
        if self.weight is not None:
            factor = factor * self.weight
        result = (wide - mean.view(column)) * factor.view(column)
        if self.bias is not None:
            result = result + self.bias.view(column)
        narrow: Tensor = result.to(input.dtype)
        return narrow

    def _remember(self, mean: Tensor, squares: Tensor, total: Tensor) -> None:
        """Update the running statistics by a batch, as batch norm does."""
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            share: Any = self.momentum
            if share is None:
                share = 1.0 / self.num_batches_tracked.to(mean.dtype)
            variance = squares / (total - 1.0).clamp(min=1.0)
            for kept, new in ((self.running_mean, mean), (self.running_var, variance)):
                kept.copy_(kept * (1.0 - share) + new * share)
