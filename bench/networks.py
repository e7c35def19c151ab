"""Networks that nobody here wrote, as torchvision, transformers and timm define them, with random
weights: ours against eager PyTorch, eager in a CUDA Graph, torch.compile and ONNX Runtime.

``BENCH_CASES="timm/davit_tiny b32;timm/gcvit_xxtiny b1" python -m bench.run --only networks``
measures any network of timm, at the size that it was made for."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch

import deuteron as dt
from bench.harness import (
    PREPARE,
    Record,
    captured,
    compiled,
    cpu_times,
    in_float64,
    onnx_runtime,
    relative_error,
    replay_times,
    turn,
    wall_times,
)

NOTE = (
    "Milliseconds per call, medians of interleaved samples, float16 on a GPU and float32 on a CPU. "
    "`compile` is torch.compile, on a GPU its mode reduce-overhead, `compile_default` its default "
    "mode there, `eager_graph` eager in a CUDA Graph; `over_best` the best of all peers over ours, "
    "wall time where it has one. `plan_s` is the time from the module to a found plan with an "
    "empty cache, `of_which_import` the share of tracing, `compile_s` what torch.compile took to "
    "its first result in a process that began with an empty cache. Errors are relative (2-norm) to "
    "the same network in float64. `regions` are "
    "those over 10 µs that were measured alone, `within_2x` and `within_25` those whose "
    "prediction was that near."
)


class First(torch.nn.Module):
    """A network's first result, whatever it is wrapped in."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        out = self.net(*inputs)
        if isinstance(out, dict):
            out = next(iter(out.values()))
        return out[0] if isinstance(out, tuple) else out


def vision(name: str, **how: Any) -> Callable[[], Any]:
    def make() -> Any:
        import torchvision

        return attrgetter(name)(torchvision.models)(**how)

    return make


def language(model: str, config: str, **how: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        found = getattr(transformers, model, None)
        if found is None:
            found = transformers.models.whisper.modeling_whisper.WhisperEncoder
        return found(getattr(transformers, config)(**how))

    return make


def branched(name: str) -> Callable[[], Any]:
    """One of timm, with the branches that it was trained with."""

    def make() -> Any:
        import timm

        return timm.create_model(name)

    return make


def of_timm(case: str) -> tuple[str, tuple[Any, Any, tuple[int, ...]]]:
    """A network that is named by a case alone, ``timm/name b32``."""
    import timm

    name, batch = case.split(" b")
    make = branched(name.removeprefix("timm/"))
    size = timm.get_pretrained_cfg(name.removeprefix("timm/")).input_size
    return name, (make, lambda batch: torch.randn(batch, *size), (int(batch),))


def image(size: int = 224) -> Callable[[int], torch.Tensor]:
    return lambda batch: torch.randn(batch, 3, size, size)


def tokens(length: int, words: int = 30000) -> Callable[[int], torch.Tensor]:
    return lambda batch: torch.randint(0, words, (batch, length))


LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "use_cache": False,
}
SEGFORMER = ("SegformerForSemanticSegmentation", "SegformerConfig")
NETWORKS: dict[str, tuple[Callable[[], Any], Callable[[int], torch.Tensor], tuple[int, ...]]] = {
    "resnet50": (vision("resnet50"), image(), (32, 1)),
    "mobilenet_v2": (vision("mobilenet_v2"), image(), (32, 1)),
    "bert_4 128": (language("BertModel", "BertConfig", num_hidden_layers=4), tokens(128), (32, 1)),
    "mobilenet_v3_large": (vision("mobilenet_v3_large"), image(), (32, 1)),
    "efficientnet_b0": (vision("efficientnet_b0"), image(), (32, 1)),
    "convnext_tiny": (vision("convnext_tiny"), image(), (32, 1)),
    "densenet121": (vision("densenet121"), image(), (32, 1)),
    "vit_b_16": (vision("vit_b_16"), image(), (32, 1)),
    "segformer_b0 512": (language(*SEGFORMER), image(512), (8, 1)),
    "llama_1b prefill 2048": (
        language("LlamaForCausalLM", "LlamaConfig", **LLAMA),
        tokens(2048),
        (1,),
    ),
    "llama_1b token": (language("LlamaForCausalLM", "LlamaConfig", **LLAMA), tokens(1), (1,)),
    "bert_base 512": (language("BertModel", "BertConfig"), tokens(512), (32, 1)),
    "swin_t": (vision("swin_t"), image(), (32, 1)),
    "regnet_y_3_2gf": (vision("regnet_y_3_2gf"), image(), (32, 1)),
    "inception_v3": (
        vision("inception_v3", aux_logits=False, init_weights=False),
        image(299),
        (32, 1),
    ),
    "efficientnet_v2_s": (vision("efficientnet_v2_s"), image(), (32, 1)),
    "t5_base encoder 512": (
        language("T5EncoderModel", "T5Config", d_model=768, d_ff=3072, num_layers=12, num_heads=12),
        tokens(512),
        (8, 1),
    ),
    "whisper_base encoder": (
        language(
            "WhisperEncoder",
            "WhisperConfig",
            encoder_layers=6,
            d_model=512,
            encoder_attention_heads=8,
        ),
        lambda batch: torch.randn(batch, 80, 3000),
        (8, 1),
    ),
    "clip vision": (language("CLIPVisionModel", "CLIPVisionConfig"), image(), (32, 1)),
    "fcn_resnet50 512": (
        vision("segmentation.fcn_resnet50", weights_backbone=None),
        image(512),
        (8, 1),
    ),
    "mobilenet_v2 asymmetric": (
        language("MobileNetV2ForImageClassification", "MobileNetV2Config"),
        image(),
        (32, 1),
    ),
    "repvgg_a0": (branched("repvgg_a0"), image(), (32, 1)),
    "mobileone_s0": (branched("mobileone_s0"), image(), (32, 1)),
    "convnextv2": (
        language("ConvNextV2ForImageClassification", "ConvNextV2Config"),
        image(),
        (32, 1),
    ),
}
# torch.compile's modes, by the name of their column.
MODES = {
    "cuda": {"compile": "reduce-overhead", "compile_default": "default"},
    "cpu": {"compile": "default"},
}
SMALLER = {"segformer_b0 512": image(256)}  # on a CPU, where these are left out:
LARGE = ("llama_1b prefill 2048", "llama_1b token", "fcn_resnet50 512", "t5_base encoder 512")


def build(make: Callable[[], Any]) -> torch.nn.Module:
    torch.manual_seed(0)
    net = First(make()).eval()
    for part in net.modules():  # as trained: norms of ones and heads of zeros hide errors
        if isinstance(part, torch.nn.BatchNorm2d):
            part.running_var.uniform_(0.5, 1.5)
            part.running_mean.normal_(0, 0.2)
        if isinstance(part, torch.nn.Linear) and not part.weight.any():
            part.weight.data.normal_(0, 0.02)
    return net


def run(device: str, compile_peer: bool = True) -> Record:
    record = Record("networks", device, NOTE)
    torch.set_grad_enabled(False)
    warnings.simplefilter("ignore")
    dtype = torch.float16 if device == "cuda" else torch.float32
    on_gpu = device == "cuda"
    asked = (case for case in sorted(record.only or ()) if case.startswith("timm/"))
    for name, (make, inputs, batches) in (NETWORKS | dict(map(of_timm, asked))).items():
        for batch in batches if on_gpu or name.startswith("timm/") else (1,):
            if not record.wants(case := f"{name} b{batch}") or (name in LARGE and not on_gpu):
                continue
            inputs = inputs if on_gpu else SMALLER.get(name, inputs)
            x = inputs(batch).to(device)
            x = x.to(dtype) if x.is_floating_point() else x
            try:
                model = build(make).to(device, dtype)
                if PREPARE in os.environ:
                    _compiled(model, x, device)
                    continue
                record.add(case=case, **_row(model, x, device, compile_peer))
            except ImportError as missing:
                record.add(case=case, note=str(missing))
            if on_gpu:
                torch.cuda.empty_cache()
    return record


def _row(
    model: torch.nn.Module, x: torch.Tensor, device: str, compile_peer: bool, seconds: float = 6.0
) -> dict[str, Any]:
    with turn():
        exact = in_float64(model, x)
        begin = time.perf_counter()
        fast = dt.optimize(model, x)
        if device == "cuda":
            torch.cuda.synchronize()
        plan_s = time.perf_counter() - begin
    peers, compile_s = _compiled(model, x, device) if compile_peer else ({}, float("nan"))
    with turn():
        times = _times(model, fast, x, peers, seconds)
    others = [t for who, t in times.items() if not who.startswith("ours")]
    ratios = [
        r.predicted_s / r.measured_s
        for r in fast.explain().report.regions
        if r.measured_s is not None and r.measured_s >= 10e-6
    ]
    return {
        **{f"{who}_ms": t for who, t in times.items()},
        "over_best": min(others) / times["ours"],
        "plan_s": plan_s,
        "of_which_import": fast.seconds["import"],
        "compile_s": compile_s,
        "error": relative_error(fast(x)[:1], exact),
        "eager_error": relative_error(model(x)[:1], exact),
        "regions": len(ratios),
        "within_2x": sum(0.5 <= r <= 2.0 for r in ratios),
        "within_25": sum(0.8 <= r <= 1.25 for r in ratios),
    }


def _times(
    model: torch.nn.Module, fast: Any, x: torch.Tensor, peers: dict[str, Any], seconds: float
) -> dict[str, float]:
    """Milliseconds of a call by contender."""
    calls: dict[str, Any] = {"eager": lambda: model(x), "ours": lambda: fast(x)} | peers
    if x.is_cuda:
        times = wall_times(calls)
        graphs = {"eager_graph": captured(lambda: model(x))}
        if fast.plan.captured is not None:
            graphs["ours_graph"] = fast.plan.captured.replay
        times |= replay_times(graphs)
    else:
        session = _session(model, x)
        times = cpu_times(calls | ({"onnx": session} if session else {}), seconds=seconds, gap=0.3)
    return times


def _compiled(model: torch.nn.Module, x: torch.Tensor, device: str) -> tuple[dict[str, Any], float]:
    """torch.compile's modes by the name of their column, and the seconds of the first of them."""
    calls, seconds = {}, []
    for peer, mode in MODES[device].items():
        calls[peer], took = compiled(model, x, mode, 4 if device == "cuda" else 1, not seconds)
        seconds.append(took)
    return calls, seconds[0]


def _session(model: torch.nn.Module, x: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    """ONNX Runtime's, or None where the network cannot be exported. torch's quick path for whole
    attention modules has no counterpart in ONNX."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return onnx_runtime(model, x)
    except Exception as error:
        print(f"  no ONNX: {str(error).splitlines()[0][:100]}")
        return None
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
