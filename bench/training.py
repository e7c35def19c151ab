"""Whole training steps: forward, loss, backward and optimiser, as users write them, against
``dt.train_step`` and ``torch.compile(backend="deuteron")``."""

from __future__ import annotations

import copy
import gc
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import deuteron as dt
from bench.harness import PREPARE, WARM_COMPILE, Record, cpu_times, turn, wall_times
from bench.networks import language, vision

NOTE = (
    "Milliseconds per step by the clock, medians of interleaved samples: bfloat16 autocast and "
    "channels last for images on a GPU, float32 on a CPU, fused AdamW. `compile` is torch.compile, "
    '`reduce` its mode reduce-overhead (on a GPU), `backend` torch.compile(backend="deuteron"), '
    "`step` dt.train_step; both measure for a few seconds a graph. `first` is the time to the end "
    "of the first step, `peak` the memory in GB that is taken for steps, `captured` whether the "
    "step is one CUDA Graph, or why not. `error` is how far the gradients of the first step are "
    "from those in float32 (on a CPU float64), relative in the 2-norm. `over_best` is the best of "
    "eager, compile and reduce over the better of ours. BENCH_PEERS=eager,step measures these "
    "alone."
)
FIND: dict[str, Any] = {"find": True}


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    batch: Callable[[], dict[str, torch.Tensor]]  # "x" and "y", or keywords of a model
    loss: Callable[..., torch.Tensor] | None = None  # without, the model has one


class Small(nn.Module):
    """A transformer of 4 layers whose step is launches more than work."""

    def __init__(self, width: int = 256, words: int = 1000) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, words)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(x))).flatten(0, 1)


def images(batch: int, size: int, classes: int = 1000) -> Callable[[], dict[str, torch.Tensor]]:
    def make() -> dict[str, torch.Tensor]:
        x = torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)
        return {"x": x, "y": torch.randint(0, classes, (batch,))}

    return make


def pixels(batch: int, size: int, classes: int) -> Callable[[], dict[str, torch.Tensor]]:
    def make() -> dict[str, torch.Tensor]:
        x = torch.randn(batch, 3, size, size).to(memory_format=torch.channels_last)
        return {"x": x, "y": torch.randint(0, classes, (batch, size, size))}

    return make


def words(batch: int, length: int, count: int, inside: bool = True) -> Callable[[], Any]:
    def make() -> dict[str, torch.Tensor]:
        ids = torch.randint(0, count, (batch, length))
        flat = {"x": ids, "y": ids.flatten()}
        return {"input_ids": ids, "labels": ids} if inside else flat

    return make


def of_pixels(found: dict[str, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(found["out"], y)


_DEEPLAB = vision("segmentation.deeplabv3_resnet50", weights=None, weights_backbone=None)
_GPT2 = language("GPT2LMHeadModel", "GPT2Config", loss_type="ForCausalLM")
_BERT = language("BertForMaskedLM", "BertConfig")
_BERT4 = language("BertForMaskedLM", "BertConfig", num_hidden_layers=4, vocab_size=8000)
CASES = {
    "cuda": {
        "resnet50 b128": Case(vision("resnet50"), images(128, 224), F.cross_entropy),
        "deeplabv3 b16": Case(_DEEPLAB, pixels(16, 512, 21), of_pixels),
        "mobilenet_v3_large b128": Case(
            vision("mobilenet_v3_large"), images(128, 224), F.cross_entropy
        ),
        "gpt2 b8 s1024": Case(_GPT2, words(8, 1024, 50257)),
        "bert b32 s512": Case(_BERT, words(32, 512, 30522)),
        "resnet18 b8 64²": Case(vision("resnet18"), images(8, 64), F.cross_entropy),
        "transformer4 b8 s128": Case(Small, words(8, 128, 1000, inside=False), F.cross_entropy),
        "convnext_tiny b64": Case(vision("convnext_tiny"), images(64, 224), F.cross_entropy),
        "efficientnet_b0 b64": Case(vision("efficientnet_b0"), images(64, 224), F.cross_entropy),
    },
    "cpu": {
        "resnet18 b4": Case(vision("resnet18"), images(4, 224), F.cross_entropy),
        "bert4 b2 s128": Case(_BERT4, words(2, 128, 8000)),
        "mobilenet_v2 b4 128²": Case(vision("mobilenet_v2"), images(4, 128), F.cross_entropy),
    },
}
PEERS = ("eager", "compile", "reduce", "backend", "step")
OURS = ("backend", "step")


class Loop:
    """A model, an optimiser and a batch, stepped in one of the ways."""

    def __init__(self, way: str, model: nn.Module, case: Case, batch: Any, device: str) -> None:
        self.model = copy.deepcopy(model)
        self.device, self.batch, self.case = device, batch, case
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.low = torch.bfloat16 if device == "cuda" else None
        self.step: Callable[[], Any] = self.written_out
        self.whole: Any = None
        call = self.loss
        if way == "step":
            example = (batch["x"], batch["y"]) if case.loss is not None else batch
            given: Any = (self.model, case.loss, self.optimizer, example)
            whole = self.whole = dt.train_step(*given, autocast=self.low, **FIND)
            named = case.loss is None
            self.step = (lambda: whole(**batch)) if named else (lambda: whole(*example))
        elif way == "backend":
            self.loss = torch.compile(call, backend=dt.backend, options=FIND)
        elif way in ("compile", "reduce"):
            mode = "reduce-overhead" if way == "reduce" else "default"
            self.loss = torch.compile(call, mode=mode)

    def loss(self) -> torch.Tensor:
        if self.case.loss is None:
            return self.model(**self.batch).loss
        return self.case.loss(self.model(self.batch["x"]), self.batch["y"])

    def gradients(self) -> list[torch.Tensor]:
        with torch.autocast(self.device, self.low, enabled=self.low is not None):
            loss = self.loss()
        loss.backward()
        found = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.optimizer.zero_grad()
        return found

    def written_out(self) -> None:
        with torch.autocast(self.device, self.low, enabled=self.low is not None):
            loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def run(device: str, compile_peer: bool = True) -> Record:
    record = Record("training", device, NOTE)
    peers = tuple(os.environ.get("BENCH_PEERS", ",".join(PEERS)).split(","))
    if not compile_peer:
        peers = tuple(way for way in peers if way not in ("compile", "reduce"))
    for name, case in CASES[device].items():
        if not record.wants(name):
            continue
        if PREPARE in os.environ:
            _compiled(case, device, peers)
            continue
        with turn():
            record.add(**measured(name, case, device, peers))
    return record


def _compiled(case: Case, device: str, peers: tuple[str, ...]) -> None:
    """Take a step in each way of torch.compile, so that its kernels are on disk."""
    model, batch = _made(case, device)
    for way in peers:
        if way in ("compile", "reduce"):
            Loop(way, model, case, batch, device).step()


def _made(case: Case, device: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = case.make().train().to(device)
    if case.loss is not None:
        model = model.to(memory_format=torch.channels_last)
    return model, {key: t.to(device) for key, t in case.batch().items()}


def measured(name: str, case: Case, device: str, peers: tuple[str, ...]) -> dict[str, Any]:
    model, batch = _made(case, device)
    exact = _exact(model, case, batch, device)
    row: dict[str, Any] = {"case": name, "dtype": "bf16" if device == "cuda" else "f32"}
    steps: dict[str, Callable[[], Any]] = {}
    for way in peers:
        if way == "reduce" and device == "cpu":
            continue
        held = _reserved(device)
        torch.manual_seed(1)
        begin = time.perf_counter()
        loop = Loop(way, model, case, batch, device)
        if way in ("eager", "backend"):  # train_step runs the same plans
            row[f"{way}_error"] = _error(loop.gradients(), exact)
        else:
            loop.step()
        _wait(device)
        if way not in ("compile", "reduce") or WARM_COMPILE not in os.environ:
            row[f"{way}_first"] = time.perf_counter() - begin
        for _ in range(8):
            loop.step()
        if device == "cuda":
            _reserved(device)
            torch.cuda.reset_peak_memory_stats()
            loop.step()
            row[f"{way}_peak"] = (torch.cuda.max_memory_reserved() - held) / 1e9
        if loop.whole is not None:
            row["captured"] = loop.whole.note or "yes"
        steps[way] = loop.step
    row |= wall_times(steps, 7, 5) if device == "cuda" else cpu_times(steps, seconds=30.0)
    theirs = [row[way] for way in peers if way not in OURS and way in row]
    ours = [row[way] for way in OURS if way in row]
    if theirs and ours:
        row["over_best"] = min(theirs) / min(ours)
    torch._dynamo.reset()
    steps.clear()
    gc.collect()
    return row


def _reserved(device: str) -> int:
    """Bytes of the GPU that are in use, once nothing is kept that nobody needs."""
    if device == "cpu":
        return 0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def _exact(model: nn.Module, case: Case, batch: Any, device: str) -> list[torch.Tensor]:
    """Gradients in a wider type, with the random numbers of the first step."""
    torch.manual_seed(1)
    loop = Loop("eager", model, case, batch, device)
    loop.low = None
    if device == "cpu":
        loop.model.double()
        loop.batch = {k: t.double() if t.is_floating_point() else t for k, t in batch.items()}
    return loop.gradients()


def _error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    pairs = list(zip(found, exact, strict=True))
    apart = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    return (apart / sum(float(b.double().square().sum()) for _, b in pairs)) ** 0.5


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
