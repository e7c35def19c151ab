"""Training on many GPUs that are not here, by estimate: the table of docs/distributed.md.

``python -m bench.scaling`` prints it. Nothing is run but the planner, on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from deuteron.distributed.layout import Layout
from deuteron.distributed.predict import RankStep
from deuteron.zoo.llama import LlamaConfig, LlamaForCausalLM
from deuteron.zoo.resnet import resnet50

SIZES = (8, 16, 64, 256, 1024)
LLAMA_7B = LlamaConfig(32000, 4096, 11008, 32, 32, 32)
LLAMA_8B = LlamaConfig(128256, 4096, 14336, 32, 32, 8)
LLAMA_13B = LlamaConfig(32000, 5120, 13824, 40, 40, 40)
# a quarter of the layers of Llama-3.1-405B, and of its words, so that stages weigh as they do there
LLAMA_405B_PART = LlamaConfig(32768, 16384, 53248, 32, 128, 8)


def _words(result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(result.flatten(0, 1).float(), target.flatten())


def _images(result: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(result.float(), target)


def llama(config: LlamaConfig, batch: int, length: int, target: str) -> RankStep:
    with torch.device("meta"):
        model, words = LlamaForCausalLM(config), torch.zeros(batch, length, dtype=torch.int64)
    return RankStep(model, _words, (words, words), target, torch.bfloat16, None)


def resnet(batch: int, target: str) -> RankStep:
    with torch.device("meta"):
        model, images = resnet50(), torch.zeros(batch, 3, 224, 224)
        labels = torch.zeros(batch, dtype=torch.int64)
    return RankStep(model, _images, (images, labels), target, torch.bfloat16, 8)


def table(
    title: str, step: RankStep, layouts: dict[str, Sequence[int]], unit: int, accumulate: int = 1
) -> None:
    """Layouts by text, with {n} for all ranks, {m} for an eighth and {q} for a quarter of them; the
    numbers of ranks; how many words or images an example has; and how many batches a step has."""
    print(f"\n{title} on each {step.target.name}\n")
    print("| GPUs | layout | step, ms | waits, ms | per GPU and second | of the first | GB |")
    print("|---|---|---|---|---|---|---|")
    for text, sizes in layouts.items():
        first = 0.0
        for n in sizes:
            named = text.format(n=n, m=n // 8, q=n // 4)
            found = step.laid_out(Layout.of(named), accumulate)
            rate = found.per_second * unit / n
            first = first or rate
            figures = found.step_s * 1e3, found.waiting_s * 1e3, rate
            shown = " | ".join(f"{x:,.0f}" if x > 100 else f"{x:.1f}" for x in figures)
            share, memory = 100 * rate / first, found.memory_bytes / 1e9
            print(f"| {n} | {found.layout} | {shown} | {share:.0f} % | {memory:.0f} |")


def main() -> None:
    seven, fifty = llama(LLAMA_7B, 2, 2048, "h200"), resnet(128, "h200")
    both = dict.fromkeys(("fsdp{n}", "fsdp{m}×tp8"), SIZES)
    piped = dict.fromkeys(("pp8×dp{m}", "pp8v2×dp{m}"), SIZES)
    table("Llama-7B, 2 × 2048 words", seven, both, 2048)
    table("Llama-7B, 4 × 2 × 2048 words", seven, piped, 2048, 4)
    table("ResNet-50, 128 images", fifty, {"dp{n}": SIZES}, 1)
    table("ResNet-50, 4 × 128 images", fifty, {"pp4×dp{q}": SIZES}, 1, 4)
    whole = llama(LLAMA_13B, 2, 4096, "a100")
    table("Llama-13B, 2 × 4096 words", whole, {"fsdp{n}": (64,)}, 4096)
    wide = llama(LLAMA_8B, 2, 8192, "h100")
    table("Llama-3.1-8B, 2 × 8192 words", wide, {"fsdp{n}": (8, 128)}, 8192)
    part, ways = llama(LLAMA_405B_PART, 4, 8192, "h100"), ("pp8×fsdp8×tp8", "pp8v2×fsdp8×tp8")
    table("32 layers of 405B, 4 × 8192 words", part, dict.fromkeys(ways, (512,)), 8192)


if __name__ == "__main__":
    main()
