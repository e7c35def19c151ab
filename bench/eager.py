"""Training written out, without plans of whole graphs: one function forward and backward, and loops
around models in which ``dt.nn.replace`` put our modules."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import deuteron as dt
from bench.functional import Case as Function
from bench.functional import both_ways, cases, errors, singles, tensors_of
from bench.harness import Record, captured, replay_times, wall_times
from bench.networks import language, vision
from bench.training import Case, Loop, images, words

NOTE = (
    "Wall time with launch overhead, medians of interleaved samples, bfloat16 (autocast for "
    "models). Functions: microseconds of forward and backward of matrices of 128 KB, 2 MB and "
    "16 MB, and of batch norm with a residual and ReLU; `eager_kernels` is torch's time by CUDA "
    "Graph replay, `more` what ours takes longer. Models: milliseconds of a step with fused AdamW, "
    "the model as it is and with its parts replaced by ours. `over_eager` is eager's time over "
    "ours."
)
COLUMNS = 1024
ROWS = (64, 1024, 8192)  # 128 KB, 2 MB and 16 MB
LLAMA = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
MODELS = {
    "resnet50 b64": Case(vision("resnet50"), images(64, 224), F.cross_entropy),
    "bert b16 s128": Case(language("BertForMaskedLM", "BertConfig"), words(16, 128, 30522)),
    "gpt2 b4 s512": Case(
        language("GPT2LMHeadModel", "GPT2Config", loss_type="ForCausalLM"), words(4, 512, 50257)
    ),
    "llama of 8 layers b4 s512": Case(
        language("LlamaForCausalLM", "LlamaConfig", **LLAMA), words(4, 512, 32000)
    ),
    "mobilenet_v3_large b64": Case(vision("mobilenet_v3_large"), images(64, 224), F.cross_entropy),
}
SHAPE = (64, 256, 56, 56)
BATCH_NORM = Function(
    "batch_norm+residual+relu",
    (SHAPE, SHAPE[1:2], SHAPE[1:2], SHAPE),
    lambda x, w, b, r: dt.functional.batch_norm(
        x, None, None, w, b, True, residual=r, activation="relu"
    ),
    lambda x, w, b, r: F.relu(F.batch_norm(x, None, None, w, b, True) + r),
    nhwc=True,
)


def run(device: str, compile_peer: bool = True) -> Record:
    record = Record("eager", device, NOTE)
    torch.set_grad_enabled(True)  # another benchmark of this process may have turned it off
    if device == "cpu":
        return record
    every = [f for rows in ROWS for f in (*cases(rows, COLUMNS), *singles(rows, COLUMNS))]
    for function in (*every, BATCH_NORM):
        title = f"{function.name} {list(function.shapes[0])}"
        if record.wants(title):
            record.add(case=title, **_attempt(_function, function))
    for name, case in MODELS.items():
        if record.wants(name):
            record.add(case=name, **_attempt(_model, case))
    return record


def _attempt(measured: Callable[[Any], dict[str, Any]], case: Any) -> dict[str, Any]:
    try:
        return measured(case)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}


def _function(case: Function) -> dict[str, Any]:
    tensors = tensors_of(case, "cuda", case.dtype)
    ways = {"eager": case.theirs, "ours": case.ours}
    runs = {name: both_ways(fn, tensors)[1] for name, fn in ways.items()}
    for _ in range(3):
        for call in runs.values():
            call()
    wall = {name: 1e3 * t for name, t in wall_times(runs, 9, 40).items()}
    row = {**wall, "more": wall["ours"] - wall["eager"], "over_eager": wall["eager"] / wall["ours"]}
    if case is not BATCH_NORM:  # torch's cannot be captured together with its gradient
        row["eager_kernels"] = 1e3 * replay_times({"": captured(runs["eager"])}, rounds=5)[""]
    return {**row, **errors(case, "cuda", case.dtype, False, rows=None)}


def _model(case: Case) -> dict[str, Any]:
    torch.manual_seed(0)
    model = case.make().train().cuda()
    if case.loss is not None:
        model = model.to(memory_format=torch.channels_last)
    batch = {key: t.cuda() for key, t in case.batch().items()}
    plain, ours = (Loop("eager", model, case, batch, "cuda") for _ in range(2))
    dt.nn.replace(ours.model)
    both = {"eager": plain.step, "ours": ours.step}
    for _ in range(20):  # modules whose calls are all small have their own class back by then
        for step in both.values():
            step()
    wall = wall_times(both, 9, 5)
    found = [loop.loss().item() for loop in (plain, ours)]
    gc.collect()
    return {**wall, "over_eager": wall["eager"] / wall["ours"], "losses": str(found)}
