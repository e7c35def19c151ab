"""The table in README, written from the records in bench/results: ``python -m bench.readme``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
BEGIN, END = "<!-- results -->", "<!-- /results -->"


def _records(pattern: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(pattern))]


def _ms(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def table() -> str:
    """Milliseconds per run of whole networks, every machine that was measured."""
    lines = [
        "Whole networks from the zoo, milliseconds per run, all contenders in one run; errors are "
        "relative to the same network in float64.",
        "",
        "| machine | network | eager | torch.compile | ONNX Runtime | Deuteron | plan ready "
        "| error (eager's) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for record in _records("models-*.json"):
        facts = record["machine"]
        machine = facts.get("gpu") or f"CPU, {facts['threads']} cores {facts['machine']}"
        for row in record["rows"]:
            compiled = row.get("compile_reduce_overhead_ms", row.get("compile_ms"))
            ours = row.get("deuteron_wall_ms", row.get("deuteron_ms"))
            onnx = _ms(row["onnx_runtime_ms"]) if "onnx_runtime_ms" in row else "–"
            lines.append(
                f"| {machine} | {row['case']} | {_ms(row['eager_ms'])} | {_ms(compiled)} "
                f"| {onnx} | **{_ms(ours)}** "
                f"| {row['plan_s']:.1f} s (compile {row['compile_s']:.0f} s) "
                f"| {row['error']:.1e} ({row['eager_error']:.1e}) |"
            )
    lines += [
        "",
        'torch.compile is `mode="reduce-overhead"` on the GPU, the default on the CPU. '
        "There the time to a plan is that of `dt.optimize` in a fresh process with empty caches. "
        "Everything that was measured, losses included, is in "
        "[bench/results](bench/results).",
    ]
    return "\n".join(lines)


def updated(text: str) -> str:
    """README with the block between the markers written anew."""
    head, rest = text.split(BEGIN, 1)
    _, tail = rest.split(END, 1)
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


if __name__ == "__main__":
    from deuteron.files import write_atomic

    readme = ROOT / "README.md"
    write_atomic(readme, updated(readme.read_text(encoding="utf-8")))
