"""The ``deuteron`` command: demo, optimize, explain, plan-parallel, bench, cache, doctor."""

from __future__ import annotations

import logging
import math
import os
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from safetensors import SafetensorError
from torch.utils import _pytree as pytree

import deuteron as dt
from deuteron.cli.models import Loaded, check_name, float_type, load
from deuteron.engines.inductor import InductorEngine
from deuteron.explain import FORMATS, check_format
from deuteron.files import cache_dir, write_atomic
from deuteron.functional.host import host_stages
from deuteron.plan.cache import FILE as MEASUREMENTS
from deuteron.plan.cache import Cache, installed
from deuteron.plan.plan import resolve_device
from deuteron.plan.tensors import relative_error
from deuteron.target import names as target_names

_HELP = "Fused operators for PyTorch, and the graph engine that decides how to run them."
app = typer.Typer(no_args_is_help=True, help=_HELP)
console = Console()
errors = Console(stderr=True)

DEMO, STOPPED = "deeplabv3_resnet50", 130


def _zoo(incomplete: str) -> list[str]:
    return [name for name in dt.zoo.names() if name.startswith(incomplete)]


def _finite(seconds: float) -> float:
    if not 0 <= seconds < math.inf:
        raise typer.BadParameter("not a number of seconds")
    return seconds


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"deuteron {dt.__version__}")
        raise typer.Exit


_OWN = "A zoo model (see 'deuteron doctor'), or your own: file.py:name or package.module:name"
Model = Annotated[str, typer.Argument(help=_OWN, autocompletion=_zoo)]
_INPUT = "An input of your own model: name=1x3x224x224:f16, name and type optional; repeatable"
Inputs = Annotated[list[str] | None, typer.Option("--input", help=_INPUT)]
Batch = Annotated[int, typer.Option(min=1, help="Batch size of the example")]
Device = Annotated[str, typer.Option(help="'cpu' or 'cuda'; the GPU if there is one")]
DTypeName = Annotated[str, typer.Option("--dtype", help="f32, f16 or bf16; f16 on a GPU")]
_SECONDS = "Seconds to spend measuring; 0 plans by estimate"
Budget = Annotated[float, typer.Option(help=_SECONDS, callback=_finite)]


@contextmanager
def _progress(title: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar while it is open; yields the function that a planner reports to."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as bar:
        task = bar.add_task(title, total=None)

        def report(stage: str, done: int, total: int) -> None:
            bar.update(task, description=f"{title}: {stage}", completed=done, total=total)

        yield report


def _say(line: str) -> None:
    """Print a line as it is, without markup and wrapping, because it may hold names and paths."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _note(line: str, style: str = "") -> None:
    errors.print(line, markup=False, highlight=False, style=style, soft_wrap=True)


def _complain(message: str) -> None:
    _note(f"error: {message}", "red")


def _writable(path: Path | None) -> None:
    """Raise an error for a file that cannot be written; call it before the work, not after."""
    if path is None:
        return
    folder = next((p for p in path.absolute().parents if p.exists()), Path("/"))
    why = ""
    if not path.name or path.is_dir():
        why = "it is a folder" if path.is_dir() else "it has no name"
    elif not folder.is_dir() or not os.access(folder, os.W_OK):
        why = f"{folder} is not a folder that can be written to"
    if why:
        raise dt.FileError(f"{str(path)!r} cannot be written: {why}", remedy="name another file")


def _optimize(model: Loaded, budget: float) -> dt.Optimized:
    """Plan a model. If the user stops that, say which measurements are kept."""
    cache = Cache.open()
    before = len(cache.entries)
    search: Any = {"find": budget > 0, "budget_s": budget, "cache": cache, "name": model.name}
    try:
        with _progress(f"planning {model.name}") as report:
            made = dt.optimize(model.net, model.args, model.kwargs, progress=report, **search)
            assert isinstance(made, dt.Optimized)  # else it would be spread over ranks
            return made
    except KeyboardInterrupt:
        new = len(cache.entries) - before
        kept = f"{new} new measurements are kept in {cache.path}" if new else "nothing was measured"
        _note(f"{kept}; the next search goes on from there" if new else kept)
        raise


def _first(result: Any) -> torch.Tensor:
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, torch.Tensor):
            return leaf
    wrong = f"the model returns no tensor, but {type(result).__name__}"
    raise dt.DeuteronError(wrong, asked="a comparison with eager", remedy="return one from forward")


def _seconds(
    calls: dict[str, Callable[[], Any]], device: torch.device, limit: float
) -> dict[str, float]:
    """Median wall seconds per call of each contender; they are timed in turns."""
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
    model: Loaded, budget: float, limit: float = 10.0, compile_too: bool = False
) -> dt.Optimized:
    """Optimise, check against eager, time both in one run, print the table."""
    net, args, kwargs = model.net, model.args, model.kwargs
    begin = time.perf_counter()
    fast = _optimize(model, budget)
    ready = time.perf_counter() - begin
    device = fast.plan.device
    calls: dict[str, Callable[[], Any]] = {"eager": lambda: net(*args, **kwargs)}
    if compile_too:
        compiled = torch.compile(net)
        compiled(*args, **kwargs)
        calls["torch.compile"] = lambda: compiled(*args, **kwargs)
    calls["deuteron"] = lambda: fast(*args, **kwargs)
    with torch.no_grad():
        ours, theirs = (_first(call(*args, **kwargs)) for call in (fast, net))
        difference = relative_error(ours, theirs.float())
        times = _seconds(calls, device, limit)
    table = Table(title=f"{model.name} on {fast.plan.decision.target.name}", title_justify="left")
    for column in ("", "ms per run", "against eager"):
        table.add_column(column, justify="left" if not column else "right")
    for name, seconds in times.items():
        table.add_row(name, f"{seconds * 1e3:.2f}", f"{times['eager'] / seconds:.2f}×")
    console.print(table)
    largest = f"largest difference from eager {difference:.1e} of the largest value"
    console.print(f"plan ready in {ready:.1f} s; {largest}")
    return fast


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which, and end")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what is going on")] = False,
) -> None:
    if verbose:
        logging.basicConfig(format="%(name)s: %(message)s")
        logging.getLogger("deuteron").setLevel(logging.INFO)


@app.command()
def demo(
    model: Annotated[str, typer.Argument(help="A zoo model", autocompletion=_zoo)] = DEMO,
    budget: Budget = 4.0,
) -> None:
    """Optimise a segmentation network, check it, time it against eager, and explain the plan."""
    where = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = load(model, device=where)
    shapes = ", ".join(str(list(t.shape)) for t in loaded.args if isinstance(t, torch.Tensor))
    count = sum(p.numel() for p in loaded.net.parameters())
    console.print(f"{model}: {count / 1e6:.1f} M parameters, input {shapes}, on {where}")
    fast = _compare(loaded, budget, 25.0)
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
    input: Inputs = None,
    budget: Budget = 4.0,
    save: Annotated[Path | None, typer.Option(help="Write the plan here (.plan.json)")] = None,
    pick: Annotated[str, typer.Option(help="Of several plans: 'deterministic', say")] = "",
) -> None:
    """Plan a model, check it against eager, list the plans found, and optionally save one."""
    _writable(save)
    fast = _compare(load(model, batch, device, dtype, input or ()), budget)
    for whole in fast.plan.alternatives():
        _say(f"  {whole}")
    if pick:
        fast.pick(pick)
    if save is not None:
        _say(f"saved {fast.save(save)}")


@app.command()
def explain(
    model: Model,
    batch: Batch = 1,
    device: Device = "",
    dtype: DTypeName = "",
    input: Inputs = None,
    budget: Budget = 0.0,
    target: Annotated[
        str, typer.Option(help="Plan for this machine, present or not", autocompletion=target_names)
    ] = "",
    format: Annotated[
        str, typer.Option(help="text, json or html", autocompletion=lambda: list(FORMATS))
    ] = "text",
    full: Annotated[bool, typer.Option("--full", help="Everything, not about 25 lines")] = False,
    out: Annotated[Path | None, typer.Option(help="Write to this file")] = None,
    errors: Annotated[bool, typer.Option(help="Measure errors against float64")] = False,
) -> None:
    """Print what would run where, what it costs and why."""
    _writable(out)
    check_format(format)
    there = dt.target(target) if target else None
    fast = _optimize(load(model, batch, device, dtype, input or ()), budget)
    text = fast.explain(format, target=there, errors=errors, full=full)
    if out is None:
        typer.echo(text)
    else:
        write_atomic(out, str(text))
        _say(f"wrote {out}")


@app.command()
def plan_parallel(
    model: Model,
    gpus: Annotated[int, typer.Option(min=1, help="How many")] = 8,
    batch: Annotated[int | None, typer.Option(min=1, help="Of a zoo model: 8 if not said")] = None,
    dtype: DTypeName = "bf16",
    input: Inputs = None,
    target: Annotated[
        str, typer.Option(help="What they are, present or not", autocompletion=target_names)
    ] = "h200",
    best: Annotated[int, typer.Option(min=1, help="Show so many layouts")] = 8,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches of each GPU in a step")] = 1,
) -> None:
    """Rank by estimate the layouts in which so many GPUs can train a model; no GPU is needed.

    Each GPU has a batch of its own or, with tensor parallelism (tp), each group of GPUs that share
    products. In a pipeline (pp) these are its micro-batches, and more of them (--accumulate) fill
    it better. The loss is the mean of the model's first result, and the optimiser keeps Adam's
    state in float32.
    """
    usual, kind, there = 1 if ":" in model else 8, float_type(dtype), dt.target(target)
    loaded = load(model, usual if batch is None else batch, "cpu", "f32", input or (), values=False)

    def loss(result: Any, _: Any) -> torch.Tensor:
        return _first(result).float().mean()

    bound = signature(loaded.net.forward).bind(*loaded.args, **loaded.kwargs)
    named = dict(zip(bound.signature.parameters, bound.args, strict=False)) | bound.kwargs
    example = named if bound.kwargs else (*bound.args, None)
    net, how = loaded.net.train(), {"dtype": kind, "accumulate": accumulate}
    found = dt.distributed.ranked(net, loss, example, there, gpus, **how)
    for prediction in found[:best]:
        _say(prediction.line)
    if len(found) > best:
        _say(f"and {len(found) - best} layouts that are slower, or do not fit")
    _say("")
    _say(str(found[0]))


@app.command()
def bench(
    models: Annotated[list[str], typer.Argument(help="Zoo models", autocompletion=_zoo)],
    batch: Batch = 1,
    device: Device = "",
    dtype: DTypeName = "",
    budget: Budget = 4.0,
    compile: Annotated[bool, typer.Option(help="Time torch.compile as well")] = False,
) -> None:
    """Time models against eager (and torch.compile) in one run."""
    for model in models:
        check_name(model)
    for model in models:
        _compare(load(model, batch, device, dtype), budget, compile_too=compile)


# ---- the cache


cache_app = typer.Typer(no_args_is_help=True, help="What was measured and compiled, and kept.")
app.add_typer(cache_app, name="cache")
KEPT = ("measurements*", "cpu-*.json", "objects/*", "ptx/*")  # all that Deuteron writes there


@cache_app.command()
def show() -> None:
    """Say where the cache is, and what it holds for which machines."""
    cache = Cache.open()
    size = sum(path.stat().st_size for path in _kept())
    _say(f"{cache.path.parent}: {size / 1e6:.1f} MB, DEUTERON_CACHE names another folder")
    where = Counter(
        ", ".join(f"{k} {v}" for k, v in entry.get("environment", {}).items())
        for entry in cache.entries.values()
    )
    for environment, count in where.most_common():
        _say(f"  {count} measurements: {environment}")
    for problem in cache.problems:
        _say(f"  problem: {problem}")


@cache_app.command()
def merge(
    others: Annotated[list[Path], typer.Argument(help="Cache folders or .jsonl files")],
) -> None:
    """Add measurements of other caches to this one; what is here already stays."""
    files = [other / MEASUREMENTS if other.is_dir() else other for other in others]
    for file in files:
        if not file.exists():
            raise dt.FileError(f"there is no cache file {str(file)!r}")
    cache = Cache.open()
    for file in files:
        new = cache.merge(file)
        if cache.fresh:
            raise dt.FileError(f"{cache.path} could not be written", where=cache.problems[-1])
        _say(f"{new} new measurements from {file}; {len(cache.entries)} in {cache.path}")
    for problem in cache.problems:
        _say(f"problem: {problem}")


@cache_app.command()
def clear(yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask")] = False) -> None:
    """Remove measurements and compiled code; other files in the folder stay."""
    found = _kept()
    if found and not yes:
        typer.confirm(f"Remove {len(found)} files from {cache_dir()}?", abort=True)
    for path in found:
        path.unlink(missing_ok=True)
    _say(f"removed {len(found)} files from {cache_dir()}")


def _kept() -> list[Path]:
    return [path for pattern in KEPT for path in cache_dir().glob(pattern) if path.is_file()]


def _host_stages() -> Table:
    """A table of what one call of a function costs the host, stage by stage."""
    device = resolve_device(None)
    table = Table(f"host time of swiglu, 64×64, on {device}, in µs", "ours", "torch", box=None)
    for stage in host_stages(device):
        torchs = "" if stage.torchs is None else f"{stage.torchs * 1e6:.1f}"
        table.add_row(stage.name, f"{max(stage.ours, 0.0) * 1e6:.1f}", torchs)
    return table


@app.command()
def doctor() -> None:
    """Say what this machine has, which engines can run, and what is in the cache."""
    table = Table(show_header=False, box=None)
    here = dt.target()
    present = {name: installed(name) or "not installed" for name in ("llvmlite", "triton")}
    rows = {
        "deuteron": dt.__version__,
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        "oneDNN": "yes" if torch.backends.mkldnn.is_available() else "no",
        "GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "compilers": ", ".join(f"{k} {v}" for k, v in present.items()),
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
    console.print(_host_stages())
    g = dt.Graph("probe")
    g.relu(g.tensor("x", (4, 4)) * 2.0).output("y")
    region = g.compile(device="cpu").decision.regions[0]
    refusal = InductorEngine().refuse(region, dt.target("cpu"), dt.Policy())
    if refusal is not None:
        _say(f"inductor on the CPU: no ({refusal.reason}; {refusal.remedy})")
    for problem in cache.problems:
        _say(f"cache problem: {problem}")


def main() -> None:
    """Entry point. Errors that a user can fix are printed in a sentence, without a traceback."""
    try:
        status = app(standalone_mode=False, prog_name="deuteron")
    except dt.DeuteronError as error:
        _complain(str(error))
        status = 1
    except (OSError, SafetensorError) as error:  # a full disk, say
        _complain(f"a file could not be read or written: {error}")
        status = 1
    except (typer.Abort, KeyboardInterrupt):
        status = STOPPED
    except Exception as error:
        if not hasattr(error, "format_message"):  # not one from the command line's parser
            raise
        if error.format_message():  # empty when help was shown instead
            _complain(error.format_message())
        status = 2
    if status == STOPPED:
        _note("stopped")
    sys.exit(status if isinstance(status, int) else 0)
