"""The figure and the table in README, written from the records in bench/results:
``python -m bench.readme``."""

from __future__ import annotations

import json
import math
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
FIGURE = ROOT / "docs" / "networks.svg"
BEGIN, END = "<!-- results -->", "<!-- /results -->"

# a peer's column in a record, ours beside it, how it is called, and its colour
PEERS = (
    ("eager_ms", "ours_ms", "eager PyTorch", "#9aa0a6"),
    ("eager_graph_ms", "ours_graph_ms", "eager in a CUDA Graph", "#5f6368"),
    ("compile_ms", "ours_ms", "torch.compile", "#3d85c6"),
    ("onnx_ms", "ours_ms", "ONNX Runtime", "#dd7e2b"),
)
AHEAD, BEHIND = "#2f9e63", "#c5221f"


def _records(pattern: str) -> list[dict[str, Any]]:
    """Those of machines as they are; one thread by its own clock is for who works on them."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob(pattern))]
    return [record for record in found if "clock" not in record["machine"]]


def _machine(record: dict[str, Any]) -> str:
    facts = record["machine"]
    return facts.get("gpu") or f"CPU, {facts['threads']} cores {facts['machine']}"


def _ms(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


# ---- the figure


class Row(NamedTuple):
    """A network: for each peer in :data:`PEERS` how many times as long as ours it takes."""

    name: str
    times: tuple[float | None, ...]

    @property
    def lead(self) -> float:
        """Over the best of the peers."""
        return min(t for t in self.times if t is not None)


def rows(record: dict[str, Any]) -> list[Row]:
    """The networks of a record, the largest lead first."""
    found = []
    for row in record["rows"]:
        both = ((row.get(theirs), row.get(ours)) for theirs, ours, _, _ in PEERS)
        times = tuple(t / o if t and o and math.isfinite(t / o) else None for t, o in both)
        found.append(Row(row["case"], times))
    return sorted(found, key=lambda row: -row.lead)


WIDE, LABEL, HIGH, TOP, GAP = 470, 196, 16, 40, 26  # a panel: its width and parts
LOW, MOST = 0.8, 24.0  # the axis, logarithmic
TICKS = (1, 2, 4, 8, 16)


def figure() -> str:
    """An SVG: a panel for each machine, processors to the left and GPUs to the right."""
    records = _records("networks-*.json")
    columns = [[r for r in records if ("gpu" in r["machine"]) == gpu] for gpu in (False, True)]
    shapes, tall = [], 0.0
    for x, column in enumerate(columns):
        y = 70.0
        for record in column:
            shapes += _panel(record, x * WIDE, y)
            y += TOP + HIGH * len(record["rows"]) + GAP
        tall = max(tall, y)
    legend, x = [], 12.0
    for _, _, name, colour in PEERS:
        legend += [_dot(x + 5, 47, colour), _text(x + 15, 51, name)]
        x += 40 + 6.6 * len(name)
    legend.append(f'<rect x="{x}" y="42" width="26" height="9" fill="{AHEAD}" opacity=".45"/>')
    legend.append(_text(x + 32, 51, "lead over the best of them"))
    title = (
        "How many times as long as Deuteron others take for one run (logarithmic; 1 is Deuteron)"
    )
    size = f'width="{2 * WIDE}" height="{tall:.0f}" viewBox="0 0 {2 * WIDE} {tall:.0f}"'
    style = "text{font:12px system-ui,sans-serif;fill:#202124}.t{font-weight:600;font-size:14px}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>{escape(title)}</title><style>{style}</style>",
        f'<rect width="{2 * WIDE}" height="{tall:.0f}" rx="6" fill="#ffffff"/>',
        _text(12, 24, title, "t"),
        *legend,
        *shapes,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _at(times: float) -> float:
    """Pixels from the left of a panel."""
    part = math.log(min(max(times, LOW), MOST) / LOW) / math.log(MOST / LOW)
    return LABEL + part * (WIDE - LABEL - 22)


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{named}>{escape(words)}</text>'


def _dot(x: float, y: float, colour: str, about: str = "") -> str:
    tip = f"<title>{escape(about)}</title>" if about else ""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">{tip}</circle>'


def _panel(record: dict[str, Any], x: float, y: float) -> list[str]:
    found, begin = rows(record), y + TOP
    end = begin + HIGH * len(found)
    shapes = [_text(x + 12, y + 14, _machine(record), "t")]
    for tick in TICKS:
        at = x + _at(tick)
        line = "#202124" if tick == 1 else "#dadce0"
        shapes.append(f'<path d="M{at:.1f} {begin - 6:.1f}V{end:.1f}" stroke="{line}"/>')
        shapes.append(_text(at, begin - 10, f"{tick}×", anchor="middle"))
    for i, row in enumerate(found):
        middle = begin + HIGH * (i + 0.5)
        left, right = sorted((_at(1.0), _at(row.lead)))
        colour = AHEAD if row.lead >= 1 else BEHIND
        shapes.append(_text(x + LABEL - 14, middle + 4, row.name, anchor="end"))
        shapes.append(
            f'<rect x="{x + left:.1f}" y="{middle - 5:.1f}" width="{max(right - left, 2):.1f}" '
            f'height="10" fill="{colour}" opacity=".45"/>'
        )
        for (_, _, name, shade), times in zip(PEERS, row.times, strict=True):
            if times is not None:
                shapes.append(_dot(x + _at(times), middle, shade, f"{name}: {times:.2f}×"))
    return shapes


def verdict() -> str:
    """One sentence on what the figure shows."""
    leads = [row.lead for record in _records("networks-*.json") for row in rows(record)]
    ahead = sum(lead >= 1 for lead in leads)
    typical = sorted(leads)[len(leads) // 2]
    return (
        f"Networks of torchvision, transformers and timm, {len(leads)} cases, against the best of "
        f"the peers that ran beside them: Deuteron is faster in {ahead} and slower in "
        f"{len(leads) - ahead}; {typical:.2f}× is the median, {min(leads):.2f}× the worst."
    )


# ---- the table


def table() -> str:
    """Milliseconds per run of whole networks, every machine that was measured."""
    lines = [
        f"![{verdict().replace('`', '')}](docs/networks.svg)",
        "",
        verdict(),
        "",
        "Whole networks from the zoo, milliseconds per run, all contenders in one run; errors are "
        "relative to the same network in float64.",
        "",
        "| machine | network | eager | torch.compile | ONNX Runtime | Deuteron | plan ready "
        "| error (eager's) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for record in _records("models-*.json"):
        for row in record["rows"]:
            compiled = row.get("compile_reduce_overhead_ms", row.get("compile_ms"))
            ours = row.get("deuteron_wall_ms", row.get("deuteron_ms"))
            onnx = _ms(row["onnx_runtime_ms"]) if "onnx_runtime_ms" in row else "–"
            lines.append(
                f"| {_machine(record)} | {row['case']} | {_ms(row['eager_ms'])} | {_ms(compiled)} "
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
    write_atomic(FIGURE, figure())
