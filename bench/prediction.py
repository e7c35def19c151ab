"""Predicted against measured time, region by region, over the networks of the zoo."""

from __future__ import annotations

import torch

import deuteron as dt
from bench.harness import Record

CASES = (
    ("resnet50", 32),
    ("deeplabv3_resnet50", 8),
    ("mobilenet_v2", 32),
    ("unet", 4),
    ("bert", 8),
    ("llama_tiny", 8),
)
NOTE = (
    "Every distinct region over 10 µs of the zoo's networks (fp16 on a GPU, fp32 on a CPU): the "
    "time the plan predicts for the engine it chose against the time measured alone. `within 2x` "
    "and `within 25%` count regions; the rows are listed under `regions`. The efficiencies "
    "behind the predictions (deuteron/engines/roofline.py) were set from measurements of these "
    "same networks, so this shows how well the table fits them, not how it does on unseen ones."
)


def run(device: str, compile_peer: bool = True) -> Record:
    record = Record("prediction", device, NOTE)
    torch.set_grad_enabled(False)
    dtype = torch.float16 if device == "cuda" else torch.float32
    details = []
    for name, batch in CASES:
        model = dt.zoo.build(name).to(device).to(dtype)
        size = batch if device == "cuda" else 1
        example = dt.zoo.example(name, size, device, dtype)
        fast = dt.optimize(model, example, budget_s=8.0)
        seen, inside, close = set(), 0, 0
        for region in fast.explain().report.regions:
            key = (region.ops, region.shape, region.candidate, region.flops, region.bytes)
            if region.measured_s is None or region.measured_s < 10e-6 or key in seen:
                continue
            seen.add(key)
            ratio = region.predicted_s / region.measured_s
            inside += 0.5 <= ratio <= 2.0
            close += 0.8 <= ratio <= 1.25
            details.append(
                {
                    "model": name,
                    "ops": " + ".join(region.ops),
                    "shape": region.shape,
                    "candidate": region.candidate,
                    "bound": region.bound,
                    "predicted_us": region.predicted_s * 1e6,
                    "measured_us": region.measured_s * 1e6,
                    "ratio": ratio,
                }
            )
        record.add(model=f"{name} b{size}", regions=len(seen), within_2x=inside, within_25pct=close)
    total = len(details)
    record.add(
        model="all",
        regions=total,
        within_2x=sum(0.5 <= d["ratio"] <= 2.0 for d in details),
        within_25pct=sum(0.8 <= d["ratio"] <= 1.25 for d in details),
    )
    record.rows += [{"model": f"· {d.pop('model')}", **d} for d in details]
    return record
