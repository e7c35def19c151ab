"""Linear layers whose weight is stored in 8 or 4 bits, and the conversion of models to them."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

from deuteron import functional as F
from deuteron.errors import DeuteronError
from deuteron.kinds import checked
from deuteron.nn.replace import Choices, check_names, chosen


class QuantizedLinear(nn.Module):
    """``torch.nn.Linear`` with a weight of 8 or 4 bits and a scale for each group of inputs. It
    takes a half or a quarter of the memory, and of the time where a batch is so small that most of
    the time goes into reading the weight.

    in_features, out_features, bias, device  as torch's
    bits       of a stored number: 4 or 8
    group      how many neighbouring inputs share a scale; it divides ``in_features``
    symmetric  without a zero for each group; see :func:`quantize_weight`
    dtype      of the scales and the bias: that of the inputs

    >>> layer = dt.nn.QuantizedLinear.from_linear(linear, bits=4)    # one layer
    >>> dt.nn.quantize(model, bits=4, exclude="lm_head")             # all layers of a model

    The weight of a new layer is 0 until ``load_state_dict`` fills it. ``weight``, ``scale`` and
    ``zero`` are buffers, ``bias`` is a parameter. Gradients reach the input and the bias.
    """

    in_features: int
    out_features: int
    bits: int
    group: int
    weight: Tensor
    scale: Tensor
    zero: Tensor | None
    bias: nn.Parameter | None

    @checked(name="QuantizedLinear")
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        bits: int = 4,
        group: int = 128,
        symmetric: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        nothing = torch.zeros(out_features, in_features, device=device, dtype=dtype)
        self._hold(nothing, bits, group, symmetric)
        self.bias = nn.Parameter(torch.zeros_like(nothing[:, 0])) if bias else None

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, bits: int = 4, group: int = 128, symmetric: bool = True
    ) -> Self:
        """Return a layer in place of ``linear``, which stays as it is; both share the bias."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.in_features, made.out_features = linear.in_features, linear.out_features
        made._hold(linear.weight, bits, group, symmetric)
        made.bias = linear.bias
        return made.train(linear.training)

    def _hold(self, weight: Tensor, bits: int, group: int, symmetric: bool) -> None:
        found = F.quantize_weight(weight, bits, group, symmetric)
        self.bits, self.group = bits, group
        for name, tensor in zip(("weight", "scale", "zero"), found, strict=True):
            self.register_buffer(name, tensor)

    def forward(self, input: Tensor) -> Tensor:
        given = self.weight, self.scale, self.zero, self.bias
        return F.linear_quantized(input, *given, bits=self.bits, group=self.group)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        how = f"bits={self.bits}, group={self.group}, symmetric={self.zero is None}"
        return f"{sizes}, bias={self.bias is not None}, {how}"


@checked("include", "exclude")
def quantize(
    model: nn.Module,
    include: Choices | None = None,
    exclude: Choices = (),
    *,
    bits: int = 4,
    group: int = 128,
    symmetric: bool = True,
) -> nn.Module:
    """Turn every ``torch.nn.Linear`` of ``model`` into a :class:`QuantizedLinear`, in place, and
    return ``model``. Biases, hooks and names stay; the weights are gone, so this is for models that
    are not trained any more.

    include, exclude        class names, module paths ("model.layers.0", also "*.mlp"; modules below
                            a path are included), classes, or functions of path and module; one or
                            several. Subclasses of Linear are left alone, and layers whose
                            weight is computed, such as by spectral_norm
    bits, group, symmetric  as for :class:`QuantizedLinear`

    >>> dt.nn.quantize(model, exclude="lm_head", bits=4, group=64)

    The layer that makes the logits is often the one to leave out: nothing follows that would
    average its errors. A weight that is shared, as with an embedding, no longer is. If a layer does
    not fit, nothing is changed and an error says which.
    """
    check_names(model, include=include, exclude=exclude)
    made = {}
    for path, module in model.named_modules():
        left_out = include is not None and not chosen(include, path, module)
        if type(module) is not nn.Linear or left_out or chosen(exclude, path, module):
            continue
        if "weight" not in module._parameters:
            continue
        try:
            made[module] = QuantizedLinear.from_linear(module, bits, group, symmetric)
        except DeuteronError as error:
            raise error.at(f"{path or 'the model itself'}, a {module}") from None
    for module, stored in made.items():
        del module.weight
        module.__class__ = QuantizedLinear  # type: ignore[assignment]
        vars(module).update(bits=bits, group=group)
        for name in ("weight", "scale", "zero"):
            module.register_buffer(name, getattr(stored, name))
    return model
