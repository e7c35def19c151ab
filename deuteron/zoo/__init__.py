"""Well-known networks in plain PyTorch, for tests, examples and benchmarks.

>>> from deuteron import zoo
>>> model = zoo.build("resnet50")
>>> logits = model(*zoo.example("resnet50", batch=2))

``build`` gives a model in evaluation mode with reproducible random weights.  Parameter names match
the public checkpoints of each architecture, so ``model.load_state_dict`` takes real weights; see
the modules of this package (``resnet``, ``bert``, ...) for the classes and further variants.
"""

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .bert import BertConfig, BertModel
from .deeplab import deeplabv3_resnet50
from .llama import LlamaConfig, LlamaForCausalLM, RMSNorm, RopeScaling
from .mobilenet import mobilenet_v2, mobilenet_v3_large
from .resnet import resnet18, resnet50
from .unet import UNet

__all__ = ["MODELS", "ZooEntry", "build", "example", "names", "randomise_"]

Device = torch.device | str
ExampleInputs = Callable[[int, Device, torch.dtype], tuple[Tensor, ...]]


@dataclass(frozen=True)
class ZooEntry:
    """How to make one model of the zoo, and inputs for it."""

    build: Callable[..., nn.Module]
    """Makes the model; keyword arguments change its sizes."""
    example_inputs: ExampleInputs
    """(batch, device, dtype) to positional inputs of the customary size, the same every time."""
    description: str
    """One line for listings."""


def _image(size: int) -> ExampleInputs:
    """Inputs for vision models: smooth blobs and some noise, scaled like normalised photographs."""

    def inputs(batch: int, device: Device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        coarse = torch.randn(batch, 3, 8, 8, generator=generator)
        image = F.interpolate(coarse, size=(size, size), mode="bilinear", align_corners=False)
        image = 1.3 * image + 0.3 * torch.randn(image.shape, generator=generator)
        return (image.to(device=device, dtype=dtype),)

    return inputs


def _tokens(vocab_size: int, length: int) -> ExampleInputs:
    """Inputs for language models: token ids, int64 whatever the dtype asked for."""

    def inputs(batch: int, device: Device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        return (torch.randint(vocab_size, (batch, length), generator=generator).to(device),)

    return inputs


def _bert(**sizes: Any) -> BertModel:
    return BertModel(BertConfig(**sizes))


def _llama(**sizes: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**sizes))


_BERT_TOKENS = _tokens(30522, 128)
_LLAMA_1B: dict[str, Any] = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192}
_LLAMA_1B |= {"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
_LLAMA_1B |= {"rope_theta": 500000.0, "rope_scaling": RopeScaling(), "tie_word_embeddings": True}


MODELS: dict[str, ZooEntry] = {
    "resnet18": ZooEntry(resnet18, _image(224), "ResNet-18 classifier, 224x224"),
    "resnet50": ZooEntry(resnet50, _image(224), "ResNet-50 classifier, 224x224"),
    "deeplabv3_resnet50": ZooEntry(
        deeplabv3_resnet50,
        _image(512),
        "DeepLabV3 segmentation on a dilated ResNet-50, 21 classes, 512x512",
    ),
    "mobilenet_v2": ZooEntry(mobilenet_v2, _image(224), "MobileNetV2 classifier, 224x224"),
    "mobilenet_v3_large": ZooEntry(
        mobilenet_v3_large, _image(224), "MobileNetV3 large classifier, 224x224"
    ),
    "unet": ZooEntry(UNet, _image(256), "U-Net segmentation, transposed convolutions, 256x256"),
    "bert": ZooEntry(_bert, _BERT_TOKENS, "BERT base encoder, 12 layers, 128 tokens"),
    "bert_4l": ZooEntry(
        partial(_bert, num_hidden_layers=4), _BERT_TOKENS, "BERT base cut to 4 layers, 128 tokens"
    ),
    "llama_tiny": ZooEntry(
        _llama, _tokens(4096, 128), "Llama-style decoder, 4 layers of 512, 128 tokens"
    ),
    "llama_1b": ZooEntry(
        partial(_llama, **_LLAMA_1B),
        _tokens(128256, 128),
        "Llama decoder of 1.2 B parameters, 128 tokens",
    ),
}
"""Every model of the zoo by name."""


def names() -> list[str]:
    """The names that ``build`` and ``example`` take, in the order of the table."""
    return list(MODELS)


def _entry(name: str) -> ZooEntry:
    if name in MODELS:
        return MODELS[name]
    near = difflib.get_close_matches(name, MODELS, n=3, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    raise ValueError(f"no model named {name!r} in the zoo{hint} Names: {', '.join(MODELS)}")


def build(name: str, *, seed: int = 0, **kw: Any) -> nn.Module:
    """The model called ``name``, on the CPU, in float32 and evaluation mode.

    The same ``seed`` gives the same weights; PyTorch's global random state is left alone.  Other
    keyword arguments go to the model: ``num_classes`` for the vision models, the fields of
    ``BertConfig`` or ``LlamaConfig`` for the language models.  Raises ValueError for a name that
    is not in ``names()``.
    """
    with torch.random.fork_rng(devices=[]):
        model = _entry(name).build(**kw)
    return randomise_(model, seed).eval()


def example(
    name: str, batch: int = 1, device: Device = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """Positional inputs for the model called ``name`` at its customary size.

    They fit ``build(name)`` without size arguments.  Language models get token ids, which stay
    int64; ``dtype`` is that of images.
    """
    return _entry(name).example_inputs(batch, device, dtype)


# ---- random weights that behave like trained ones
#
# PyTorch's own defaults leave batch-norm statistics at 0 and 1, so that ignoring or misplacing them
# goes unnoticed, and let activations grow or die with depth in evaluation mode. Here no number has
# a neutral value, so that mistakes show, and activations stay near 1.


def _fill(module: nn.Module, generator: torch.Generator) -> None:
    """Set the parameters and buffers that ``module`` itself owns."""

    def draw(name: str, how: str, *limits: float) -> None:
        tensor = getattr(module, name, None)
        if tensor is not None:
            getattr(tensor, how)(*limits, generator=generator)

    match module:
        case nn.Conv2d() | nn.ConvTranspose2d() | nn.Linear():
            draw("weight", "normal_", 0.0, math.sqrt(_power(module)))
            draw("bias", "normal_", 0.0, 0.1)
        case nn.Embedding():
            draw("weight", "normal_", 0.0, 0.5)
        case nn.BatchNorm2d() | nn.LayerNorm() | RMSNorm():
            draw("weight", "uniform_", 0.8, 1.2)
            draw("bias", "normal_", 0.0, 0.1)
            draw("running_mean", "normal_", 0.0, 0.2)
            draw("running_var", "uniform_", 0.6, 1.6)
        case _ if any(True for _ in module.parameters(recurse=False)):
            raise TypeError(f"no rule to randomise the parameters of a {type(module).__name__}")


def _power(module: nn.Conv2d | nn.ConvTranspose2d | nn.Linear) -> float:
    """The variance of weights that keeps activations near 1."""
    if isinstance(module, nn.ConvTranspose2d):
        taps = module.weight[0, 0].numel() / math.prod(module.stride)
        return 1 / (module.in_channels // module.groups * taps)
    # A convolution without a bias feeds a norm and a rectifier, which halves the power.
    rectified = isinstance(module, nn.Conv2d) and module.bias is None
    return (2.0 if rectified else 1.0) / module.weight[0].numel()


@torch.no_grad()
def randomise_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Overwrite all weights and batch-norm statistics of ``model`` from ``seed``; return it.

    The model must be on the CPU.  Raises TypeError for a layer with parameters that it does not
    know, rather than leaving them as they are.
    """
    generator = torch.Generator().manual_seed(seed)  # values depend on seed and layer order only
    for module in model.modules():
        _fill(module, generator)
    # a residual block tells in branch_end which weight ends its branch, and what to scale it by
    for branch_end in (getattr(module, "branch_end", None) for module in model.modules()):
        if branch_end is not None:
            weight, scale = branch_end()
            weight.mul_(scale)
    return model
