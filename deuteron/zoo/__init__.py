"""Well-known networks in plain PyTorch, for tests, examples and benchmarks.

>>> from deuteron import zoo
>>> model = zoo.build("resnet50")
>>> logits = model(*zoo.example("resnet50", batch=2))

``build`` gives a model in evaluation mode with reproducible random weights.  Parameter names match
the public checkpoints of each architecture, so ``model.load_state_dict`` takes real weights; see
the modules of this package (``resnet``, ``bert``, ...) for the classes and further variants.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .bert import BertConfig, BertModel
from .deeplab import deeplabv3_resnet50
from .llama import LlamaConfig, LlamaForCausalLM, RopeScaling
from .mobilenet import mobilenet_v2, mobilenet_v3_large
from .resnet import resnet18, resnet50
from .unet import UNet
from .weights import randomise_

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
        ids = torch.randint(vocab_size, (batch, length), generator=generator)
        return (ids.to(device),)

    return inputs


def _bert(**sizes: Any) -> BertModel:
    return BertModel(BertConfig(**sizes))


def _llama(**sizes: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**sizes))


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
    "bert": ZooEntry(_bert, _tokens(30522, 128), "BERT base encoder, 12 layers, 128 tokens"),
    "bert_4l": ZooEntry(
        partial(_bert, num_hidden_layers=4),
        _tokens(30522, 128),
        "BERT base cut to 4 layers, 128 tokens",
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
    entry = _entry(name)
    with torch.random.fork_rng(devices=[]):
        model = entry.build(**kw)
    return randomise_(model, seed).eval()


def example(
    name: str, batch: int = 1, device: Device = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """Positional inputs for the model called ``name`` at its customary size.

    They fit ``build(name)`` without size arguments.  Language models get token ids, which stay
    int64; ``dtype`` is that of images.
    """
    return _entry(name).example_inputs(batch, device, dtype)
