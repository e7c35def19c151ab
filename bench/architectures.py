"""Twenty architectures of transformers at small sizes, with random weights: ours against eager
PyTorch and ONNX Runtime on a CPU, or eager in a CUDA Graph and torch.compile on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from bench.harness import Record
from bench.networks import NOTE, First, _row, image, language, tokens

PLAIN = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
PLAIN |= {"num_attention_heads": 4}
WORDS = {**PLAIN, "vocab_size": 8000}
GROUPED = {**WORDS, "num_key_value_heads": 2, "use_cache": False}
PATCHES = {**PLAIN, "image_size": 224, "patch_size": 16}
text = tokens(128, 8000)

ARCHITECTURES: dict[str, tuple[Callable[[], Any], Callable[[int], torch.Tensor]]] = {
    "bert": (language("BertModel", "BertConfig", **WORDS), text),
    "roberta": (language("RobertaModel", "RobertaConfig", **WORDS), text),
    "distilbert": (
        language(
            "DistilBertModel",
            "DistilBertConfig",
            dim=256,
            hidden_dim=1024,
            n_layers=4,
            n_heads=4,
            vocab_size=8000,
        ),
        text,
    ),
    "albert": (language("AlbertModel", "AlbertConfig", embedding_size=128, **WORDS), text),
    "electra": (language("ElectraModel", "ElectraConfig", embedding_size=128, **WORDS), text),
    "mobilebert": (
        language("MobileBertModel", "MobileBertConfig", num_hidden_layers=4, vocab_size=8000),
        text,
    ),
    "gpt2": (
        language(
            "GPT2LMHeadModel",
            "GPT2Config",
            n_embd=256,
            n_layer=4,
            n_head=4,
            vocab_size=8000,
            use_cache=False,
        ),
        text,
    ),
    "gpt_neox": (language("GPTNeoXForCausalLM", "GPTNeoXConfig", use_cache=False, **WORDS), text),
    "llama": (language("LlamaForCausalLM", "LlamaConfig", **GROUPED), text),
    "mistral": (language("MistralForCausalLM", "MistralConfig", **GROUPED), text),
    "qwen2": (language("Qwen2ForCausalLM", "Qwen2Config", **GROUPED), text),
    "gemma": (language("GemmaForCausalLM", "GemmaConfig", head_dim=64, **GROUPED), text),
    "phi": (language("PhiForCausalLM", "PhiConfig", use_cache=False, **WORDS), text),
    "bloom": (
        language(
            "BloomForCausalLM",
            "BloomConfig",
            hidden_size=256,
            n_layer=4,
            n_head=4,
            vocab_size=8000,
            use_cache=False,
        ),
        text,
    ),
    "t5 encoder": (
        language(
            "T5EncoderModel",
            "T5Config",
            d_model=256,
            d_ff=1024,
            num_layers=4,
            num_heads=4,
            vocab_size=8000,
        ),
        text,
    ),
    "vit": (language("ViTModel", "ViTConfig", **PATCHES), image()),
    "deit": (language("DeiTModel", "DeiTConfig", **PATCHES), image()),
    "dinov2": (language("Dinov2Model", "Dinov2Config", **{**PATCHES, "patch_size": 14}), image()),
    "swin": (
        language("SwinModel", "SwinConfig", embed_dim=48, depths=[2, 2, 2], num_heads=[2, 4, 8]),
        image(),
    ),
    "mobilevit": (language("MobileViTModel", "MobileViTConfig"), image(256)),
    "poolformer": (language("PoolFormerModel", "PoolFormerConfig"), image()),
    "regnet": (language("RegNetModel", "RegNetConfig"), image()),
    "resnet": (language("ResNetModel", "ResNetConfig"), image()),
    "wav2vec2": (
        language("Wav2Vec2Model", "Wav2Vec2Config", conv_dim=(128,) * 7, **PLAIN),
        lambda batch: torch.randn(batch, 16000),
    ),
}


def run(device: str, compile_peer: bool = True) -> Record:
    record = Record("architectures", device, NOTE)
    torch.set_grad_enabled(False)
    warnings.simplefilter("ignore")
    dtype = torch.float16 if device == "cuda" else torch.float32
    for name, (make, inputs) in ARCHITECTURES.items():
        if record.wants(name):
            torch.manual_seed(0)
            x = inputs(1).to(device)
            x = x.to(dtype) if x.is_floating_point() else x
            net = First(make()).eval().to(device, dtype)
            record.add(case=name, **_row(net, x, device, compile_peer, seconds=4.0))
    return record
