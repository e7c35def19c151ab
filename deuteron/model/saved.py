"""An optimised module as files: readable JSON with all sizes, and the weights beside it.

For each size the file holds the graph as it was imported and what was chosen for it. Passes run
again when the plan is needed, so that what they fold is computed from the weights, which are in the
file once. Files are data: parsed, checked, never run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deuteron.errors import BindError, DeuteronError, FileError
from deuteron.files import reading, saving
from deuteron.frontends.sparse import is_sparse
from deuteron.frontends.torch_export import Imported
from deuteron.ir.graph import Constant
from deuteron.ir.text import INLINE, in_pairs
from deuteron.kinds import checked
from deuteron.model.optimized import Optimized
from deuteron.model.plans import Kept, Plans, is_extra, private, undisturbed
from deuteron.model.structure import structure_data, structure_of, values_data, values_of
from deuteron.model.vary import Vary
from deuteron.plan import resolve_device
from deuteron.plan.cache import checksum
from deuteron.plan.serialize import (
    graph_record,
    load_tensors,
    read_graph,
    read_policy,
    read_record,
    weights_path,
)

FORMAT, VERSION, PAIRS = "deuteron-model", 1, "pairs "
Tensors = dict[str, torch.Tensor]  # by name: "state …" for weights, "constant …" for all others


# ---- writing


def save(plans: Plans, path: Path) -> Path:
    """Write both files completely before either takes its place."""
    from safetensors.torch import save_file

    record, tensors = _record(plans)
    # safetensors has no complex numbers: they are stored as pairs
    kept = {f"{PAIRS if t.is_complex() else ''}{name}": t for name, t in tensors.items()}
    whole = {name: in_pairs(t.detach().cpu()).contiguous() for name, t in kept.items()}
    with saving(path) as model_file, saving(weights_path(path)) as weights_file:
        model_file.write_text(json.dumps(record, indent=1) + "\n")
        # slices of one block of memory become tensors of their own in the file
        save_file({n: t if _alone(t) else t.clone() for n, t in whole.items()}, weights_file)
    return path


def _alone(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def _record(plans: Plans) -> tuple[dict[str, Any], Tensors]:
    """Return the record of the plans, as plain data, and the tensors that it names."""
    tensors: Tensors = {}
    state: dict[str, str] = {}
    places: dict[object, str] = {}  # a weight with two names is stored once
    for name, tensor in plans.state_dict().items():
        if is_sparse(tensor):
            continue  # its parts are constants of the plans
        place = _place(tensor) if tensor.numel() else name
        state[name] = places.setdefault(place, f"state {name}")
        tensors.setdefault(state[name], tensor)
    call = plans.call
    assert call is not None
    record: dict[str, Any] = {"format": FORMAT, "version": VERSION, "device": str(plans.device)}
    record |= {"policy": plans.policy.as_dict(), "state": state}
    record["vary"] = None
    if plans.vary is not None:
        record["vary"] = {p: {str(a): n for a, n in v.items()} for p, v in plans.vary.names.items()}
    record["call"] = {
        "inputs": values_data(call.inputs),
        "structure": structure_data(call.in_spec),
        "paths": list(call.paths),
        "parameters": list(call.parameters),
    }
    record |= {"training": plans.training, "sizes": []}
    for kept in plans.kept().values():
        with undisturbed(plans.device):
            imported = plans.imported_again(kept)
        graph, constants = imported.graph, {}
        for name, constant in graph.constants.items():
            if constant.type.numel > INLINE:
                known = places.get(_place(constant.data))
                constants[name] = known or f"constant {constant.digest}"
                tensors.setdefault(constants[name], constant.data)
        size = {**graph_record(graph), "constants": constants, "chosen": dict(kept.record)}
        size |= {"outputs": values_data(imported.outputs), "opaque": list(imported.opaque)}
        size |= {"structure": structure_data(imported.out_spec), "own": kept.own}
        record["sizes"].append(size)
    record["sum"] = checksum(record)
    return record, tensors


def _place(tensor: torch.Tensor) -> object:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


# ---- reading


@checked("device")
def load(
    path: str | Path, model: nn.Module | None = None, device: str | torch.device | None = None
) -> Optimized:
    """Read what ``fast.save(path)`` wrote: the same call, with the same weights and plans.

    ``model`` is a module like the one that was saved, with any weights. With it other sizes can be
    planned and other weights put in; without, only the saved sizes run. ``device`` is by default
    the one that it was saved on; what was chosen for another machine is chosen again for this one.

    >>> fast.save("model.json")
    >>> fast = dt.load("model.json")        # in another process"""
    path = Path(path)
    with reading(path):
        record = read_record(path, FORMAT, VERSION)
        if record.get("sum") != checksum(record):
            raise FileError("it was edited or damaged (checksum differs)", remedy="save it again")
        where = _device(record, device)
        tensors = {n: t.to(where) for n, t in _tensors(weights_path(path)).items()}
        module = None if model is None else _filled(model, _state(record, tensors))
        return restored(record, tensors, where, module)


def _tensors(path: Path) -> Tensors:
    found = load_tensors(path)
    try:
        for name in [n for n in found if n.startswith(PAIRS)]:
            found[name.removeprefix(PAIRS)] = torch.view_as_complex(found.pop(name))
    except RuntimeError as error:
        raise FileError(f"the weights {path.name!r} are damaged: {error}") from None
    return found


def _device(record: Mapping[str, Any], device: str | torch.device | None) -> torch.device:
    saved = str(record.get("device"))
    there = saved == "cpu" or torch.cuda.is_available()
    return resolve_device(device if device is not None else saved if there else "cpu")


def _state(record: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """The weights by the names that the module has for them."""
    try:
        return {str(name): tensors[kept] for name, kept in record["state"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise FileError(f"the list of weights is damaged: {error!r}") from None


def restored(
    record: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
    module: nn.Module | None,
) -> Optimized:
    """The optimised module of a record; ``module`` has the weights that are among ``tensors``."""
    policy, state = read_policy(dict(record)), _state(record, tensors)
    missing = "a file holds no module", "give the module: dt.load(path, model)"
    plans = Plans(module, device, policy, state=state, missing=missing)
    constants = {name: Constant(tensor) for name, tensor in tensors.items()}
    try:
        sizes = [_size(size, constants, record["call"], device) for size in record["sizes"]]
        plans.training = bool(record["training"])
        if record["vary"] is not None:
            axes = record["vary"].items()
            plans.vary = Vary({p: {int(a): str(n) for a, n in v.items()} for p, v in axes})
    except DeuteronError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise FileError(f"the file is damaged: {error!r}") from None
    if not sizes:
        raise FileError("it holds no plan")
    for (imported, choices), size in zip(sizes, record["sizes"], strict=True):
        imported = replace(imported, graph=plans.weights.imported(imported.graph))
        types = tuple(imported.graph.types[name] for name in imported.graph.inputs)
        plans.later[tuple(t.shape for t in types)] = Kept(
            types, choices, imported, bool(size.get("own"))
        )
    plans.call, plans.name = sizes[0][0].without_graph(), sizes[0][0].graph.name
    with undisturbed(device):
        plans.again(next(iter(plans.later)))
    return Optimized(plans, {})


def _size(
    size: Mapping[str, Any],
    constants: Mapping[str, Constant],
    call: Mapping[str, Any],
    device: torch.device,
) -> tuple[Imported, Mapping[str, Any]]:
    """One size as it was imported, and what was chosen for it."""
    given = {name: constants[kept] for name, kept in size["constants"].items()}
    graph = read_graph(size, given, "")
    inputs, in_spec = values_of(call["inputs"], device), structure_of(call["structure"])
    outputs, out_spec = values_of(size["outputs"], device), structure_of(size["structure"])
    paths, parameters, opaque = (
        tuple(map(str, names)) for names in (call["paths"], call["parameters"], size["opaque"])
    )
    named = [given for given in inputs if isinstance(given, str)]
    results = [name for name in outputs if isinstance(name, str)]
    if (
        (tuple(named), results) != (graph.inputs, [name for name, _ in graph.outputs])
        or (in_spec.num_leaves, out_spec.num_leaves) != (len(inputs), len(outputs))
        or len(paths) != len(inputs)
    ):
        raise FileError("the call does not fit the graph")
    if not isinstance(size["chosen"], dict):
        raise FileError("what was chosen is damaged")
    call_of = (graph, inputs, outputs, in_spec, out_spec, paths, parameters, opaque)
    return Imported(*call_of), size["chosen"]


def _filled(model: nn.Module, state: Mapping[str, torch.Tensor]) -> nn.Module:
    """A copy of the user's module with the saved weights, which are in memory once."""
    module = private(model)
    if isinstance(module, str):
        raise DeuteronError(f"the module cannot be copied: {module}", asked="load(path, model)")
    try:
        extra = {name: t for name, t in module.state_dict().items() if is_extra(name, t)}
        module.load_state_dict(extra | dict(state), assign=True)
    except RuntimeError as error:
        wrong = f"the module is not like the one that was saved: {error}"
        remedy = "give a module of the same class and sizes, or leave it out"
        raise BindError(wrong, asked="load(path, model)", remedy=remedy) from None
    return module


# ---- pickles, which hold the module as well


def pickled(plans: Plans, seconds: Mapping[str, float]) -> Any:
    """What pickle writes: the record, the module if there is one, and the tensors that it does not
    hold."""
    record, tensors = _record(plans)
    if plans.module is not None:
        tensors = {name: t for name, t in tensors.items() if name.startswith("constant ")}
    return unpickled, (record, tensors, plans.module, dict(seconds))


def unpickled(
    record: Mapping[str, Any], tensors: Tensors, module: nn.Module | None, seconds: Any
) -> Optimized:
    """The optimised module that was pickled."""
    if module is not None:
        state = module.state_dict().items()
        tensors = tensors | {f"state {name}": t for name, t in state if not is_extra(name, t)}
    found = restored(record, tensors, torch.device(str(record["device"])), module)
    found.seconds = seconds
    return found
