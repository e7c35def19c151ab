"""The ``deuteron`` command: demo, optimize, explain, bench, doctor."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from torch.utils import _pytree as pytree

import deuteron as dt
from deuteron.engines.inductor import InductorEngine
from deuteron.files import write_atomic
from deuteron.plan import resolve_device
from deuteron.plan.cache import Cache
from deuteron.plan.tensors import relative_error
from deuteron.target import names as target_names

_HELP = "Fused operators for PyTorch, and the graph engine that decides how to run them."
app = typer.Typer(add_completion=False, no_args_is_help=True, help=_HELP)
console = Console()
errors = Console(stderr=True)

Model = Annotated[
    str, typer.Argument(help="A zoo model (see 'deuteron doctor') or package.module:callable")
]
Batch = Annotated[int, typer.Option(min=1, help="Batch size of the example")]
Device = Annotated[str, typer.Option(help="'cpu' or 'cuda'; the GPU if there is one")]
DTypeName = Annotated[str, typer.Option("--dtype", help="f32, f16 or bf16; f16 on a GPU")]
Loaded = tuple[torch.nn.Module, tuple[Any, ...]]  # a model and its example
Budget = Annotated[float, typer.Option(help="Seconds to spend measuring; 0 plans by estimate")]


@contextmanager
def _progress(title: str) -> Iterator[Callable[[str, int, int], None]]:
    """A bar that a planner can report to."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task(title, total=None)

        def report(stage: str, done: int, total: int) -> None:
            bar.update(task, description=f"{title}: {stage}", completed=done, total=total)

        yield report


def _say(line: str) -> None:
    """A line as it is: names and paths are neither markup nor wrapped."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _complain(message: str) -> None:
    errors.print(f"error: {message}", markup=False, highlight=False, style="red", soft_wrap=True)


def _load(model: str, batch: int, device: str, dtype: str) -> Loaded:
    """The module and example inputs on the device."""
    where = resolve_device(device or None)
    named = dt.ir.dtype(dtype or ("f16" if where.type == "cuda" else "f32"))
    kind = named.torch
    if not named.is_float:
        raise dt.DeuteronError(f"a model cannot be {named.name}", remedy="use f32, f16 or bf16")
    if ":" in model:
        if batch != 1:
            wrong = f"the example of {model!r} has a batch size already"
            remedy = "leave --batch out, and make the example that large"
            raise dt.DeuteronError(wrong, asked=f"--batch {batch}", remedy=remedy)

        def moved(t: torch.Tensor) -> torch.Tensor:
            return t.to(where, kind if dtype and t.is_floating_point() else t.dtype)

        module, inputs = _own(model)
        module = module.to(kind) if dtype else module
        return module.to(where).eval(), pytree.tree_map_only(torch.Tensor, moved, inputs)
    try:
        net = dt.zoo.build(model).to(where).to(kind)
    except ValueError as error:
        raise dt.DeuteronError(str(error), asked=f"model {model!r}") from None
    example = dt.zoo.example(model, batch, where, kind)
    if where.type == "cuda" and any(isinstance(m, torch.nn.Conv2d) for m in net.modules()):
        net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        example = tuple(t.contiguous(memory_format=torch.channels_last) for t in example)
    return net, example


def _own(model: str) -> Loaded:
    """What the callable ``package.module:name`` returns: a module and its example inputs."""
    path, _, attribute = model.partition(":")
    sys.path.insert(0, ".")
    try:
        made = getattr(importlib.import_module(path), attribute)()
    except (ImportError, AttributeError) as error:
        wrong = f"{model!r} cannot be loaded: {error}"
        remedy = "name a callable that returns (module, example inputs)"
        raise dt.DeuteronError(wrong, asked=f"model {model!r}", remedy=remedy) from None
    pair = isinstance(made, tuple) and len(made) == 2
    if not pair or not isinstance(made[0], torch.nn.Module):
        what = f"({type(made[0]).__name__}, …)" if pair else f"a {type(made).__name__}"
        remedy = "return (module, tuple of example inputs)"
        raise dt.DeuteronError(f"{model!r} returned {what}", remedy=remedy)
    module, example = made
    return module, (example,) if isinstance(example, torch.Tensor) else tuple(example)


def _optimize(net: torch.nn.Module, example: tuple[Any, ...], budget: float) -> dt.Optimized:
    with _progress("planning") as report:
        return dt.optimize(net, example, find=budget > 0, budget_s=budget, progress=report)


def _first(result: Any) -> torch.Tensor:
    flat = pytree.tree_leaves(result)
    tensor: torch.Tensor = next(t for t in flat if isinstance(t, torch.Tensor))
    return tensor


def _seconds(
    calls: dict[str, Callable[[], Any]], device: torch.device, limit: float
) -> dict[str, float]:
    """Median wall seconds per call, contenders in turns."""
    sync: Callable[[], Any] = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + limit
    with _progress("timing") as report:
        for turn in range(30):
            for name, fn in calls.items():
                sync()
                begin = time.perf_counter()
                fn()
                sync()
                samples[name].append(time.perf_counter() - begin)
            report("in turns", turn + 1, 30)
            if time.perf_counter() > end and turn >= 1:
                break
    return {name: statistics.median(s[1:] or s) for name, s in samples.items()}


def _compare(
    model: str, loaded: Loaded, budget: float, limit: float = 10.0, compile_too: bool = False
) -> dt.Optimized:
    """Optimise, check against eager, time both in one run, print the table."""
    net, example = loaded
    begin = time.perf_counter()
    fast = _optimize(net, example, budget)
    ready = time.perf_counter() - begin
    device = fast.plan.device
    calls: dict[str, Callable[[], Any]] = {"eager": lambda: net(*example)}
    if compile_too:
        compiled = torch.compile(net)
        compiled(*example)
        calls["torch.compile"] = lambda: compiled(*example)
    calls["deuteron"] = lambda: fast(*example)
    with torch.no_grad():
        difference = relative_error(_first(fast(*example)), _first(net(*example)).float())
        times = _seconds(calls, device, limit)
    table = Table(title=f"{model} on {fast.plan.decision.target.name}", title_justify="left")
    for column in ("", "ms per run", "against eager"):
        table.add_column(column, justify="left" if not column else "right")
    for name, seconds in times.items():
        table.add_row(name, f"{seconds * 1e3:.2f}", f"{times['eager'] / seconds:.2f}×")
    console.print(table)
    largest = f"largest difference from eager {difference:.1e} of the largest value"
    console.print(f"plan ready in {ready:.1f} s; {largest}")
    return fast


@app.command()
def demo(
    model: Annotated[str, typer.Argument(help="A zoo model")] = "deeplabv3_resnet50",
    budget: Budget = 4.0,
) -> None:
    """Optimise a segmentation network, check it, time it against eager, and explain the plan."""
    where = "cuda" if torch.cuda.is_available() else "cpu"
    net, example = _load(model, 1, where, "")
    shapes = ", ".join(str(list(t.shape)) for t in example if isinstance(t, torch.Tensor))
    count = sum(p.numel() for p in net.parameters())
    console.print(f"{model}: {count / 1e6:.1f} M parameters, input {shapes}, on {where}")
    fast = _compare(model, (net, example), budget, 25.0)
    console.print()
    _say(str(fast.explain()))
    if where == "cpu":
        there = fast.explain(target="h200")
        assert not isinstance(there, str)
        there_ms = f"{there.report.predicted_s * 1e3:.2f} ms predicted"
        how = "(fp32; see: deuteron explain --target h200)"
        console.print(f"\nThe same network planned for an H200: {there_ms} {how}")


@app.command()
def optimize(
    model: Model,
    batch: Batch = 1,
    device: Device = "",
    dtype: DTypeName = "",
    budget: Budget = 4.0,
    save: Annotated[Path | None, typer.Option(help="Write the plan here (.plan.json)")] = None,
) -> None:
    """Plan a model, check it against eager, and optionally save the plan."""
    fast = _compare(model, _load(model, batch, device, dtype), budget)
    if save is not None:
        _say(f"saved {fast.save(save)}")


@app.command()
def explain(
    model: Model,
    batch: Batch = 1,
    device: Device = "",
    dtype: DTypeName = "",
    budget: Budget = 0.0,
    target: Annotated[str, typer.Option(help="Plan for this machine, present or not")] = "",
    format: Annotated[str, typer.Option(help="text, json or html")] = "text",
    out: Annotated[Path | None, typer.Option(help="Write to this file")] = None,
    errors: Annotated[bool, typer.Option(help="Measure errors against float64")] = False,
) -> None:
    """Print what would run where, what it costs and why."""
    there = dt.target(target) if target else None
    net, example = _load(model, batch, device, dtype)
    text = _optimize(net, example, budget).explain(format, target=there, errors=errors)
    if out is None:
        typer.echo(text)
    else:
        write_atomic(out, str(text))
        _say(f"wrote {out}")


@app.command()
def bench(
    models: Annotated[list[str], typer.Argument(help="Zoo models")],
    batch: Batch = 1,
    device: Device = "",
    dtype: DTypeName = "",
    budget: Budget = 4.0,
    compile: Annotated[bool, typer.Option(help="Time torch.compile as well")] = False,
) -> None:
    """Time models against eager (and torch.compile) in one run."""
    for model in models:
        _compare(model, _load(model, batch, device, dtype), budget, compile_too=compile)


@app.command()
def doctor() -> None:
    """Say what this machine has, which engines can run, and what is in the cache."""
    table = Table(show_header=False, box=None)
    here = dt.target()
    packages = ("triton", "onnx", "safetensors", "numba", "llvmlite")
    present = {name: "yes" if importlib.util.find_spec(name) else "no" for name in packages}
    rows = {
        "deuteron": dt.__version__,
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        "oneDNN": "yes" if torch.backends.mkldnn.is_available() else "no",
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "optional packages": ", ".join(f"{k} {v}" for k, v in present.items()),
        "target": f"{here.name}: {here.stream / 1e9:.0f} GB/s, "
        f"{here.rate('f32') / 1e9:.0f} GFLOP/s f32, {here.call * 1e6:.1f} µs per call",
        "other targets": ", ".join(target_names()),
        "engines": ", ".join(f"{e.name} {e.version}" for e in dt.engines()),
        "zoo": ", ".join(dt.zoo.names()),
    }
    cache = Cache.open()
    rows["cache"] = f"{cache.path}: {len(cache.entries)} measurements"
    for name, value in rows.items():
        table.add_row(name, Text(str(value)))  # not markup: a path may hold brackets
    console.print(table)
    g = dt.Graph("probe")
    g.relu(g.tensor("x", (4, 4)) * 2.0).output("y")
    region = g.compile(device="cpu").decision.regions[0]
    refusal = InductorEngine().refuse(region, dt.target("cpu"), dt.Policy())
    if refusal is not None:
        _say(f"inductor on the CPU: no ({refusal.reason}; {refusal.remedy})")
    for problem in cache.problems:
        _say(f"cache problem: {problem}")


def main() -> None:
    """Entry point: errors we raise on purpose are shown without a traceback."""
    try:
        app(standalone_mode=False)
    except dt.DeuteronError as error:
        _complain(str(error))
        sys.exit(1)
    except typer.Exit as done:
        sys.exit(done.exit_code)
    except typer.Abort:
        sys.exit(130)
    except Exception as error:
        if hasattr(error, "format_message"):  # a usage error from the command line parser
            if error.format_message():  # empty when help was shown instead
                _complain(error.format_message())
            sys.exit(2)
        raise
