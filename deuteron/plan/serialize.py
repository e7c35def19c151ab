"""Plans as files: readable JSON, weights beside it. Files are data: parsed, checked, never run.

A plan file holds the optimised graph as text, the policy, and one entry per region with the
candidate that runs it. When it is loaded, an entry that is damaged, or whose engine is gone, has
another version or no longer offers that candidate, is chosen anew. On another machine, or with
other library versions, the other choices stay, but their measured times are dropped. The plan's
notes say so in both cases. The graph and the weights must be intact."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from deuteron.errors import DeuteronError, FileError
from deuteron.files import reading, saving
from deuteron.ir.graph import Constant, Graph
from deuteron.ir.region import Region
from deuteron.ir.spec import check
from deuteron.ir.text import INLINE, in_pairs, parse_graph, print_graph
from deuteron.ops import table
from deuteron.passes import PassRecord, fuse, run_passes
from deuteron.passes.in_place import Placed
from deuteron.plan.cache import checksum, environment, knobs_key, plain_knobs
from deuteron.plan.choose import Choice, Survey, choose, heaviest, heuristic, marked
from deuteron.plan.decide import Decision, context
from deuteron.plan.in_place import as_recorded, pass_record, record_of
from deuteron.plan.weights import Weights
from deuteron.policy import Policy
from deuteron.target import target

FORMAT = "deuteron-plan"
READERS = {FORMAT: "dt.load_plan", "deuteron-model": "dt.load"}
VERSION = 2


def weights_path(path: Path) -> Path:
    """Where the weights of the plan at ``path`` lie: the same name, .safetensors."""
    stem = path.name.removesuffix(".json").removesuffix(".plan")
    return path.with_name(f"{stem}.safetensors")


def save_decision(decision: Decision, device: torch.device, path: Path) -> Path:
    """Write a plan and its weights. Both are written under temporary names first; then the weights
    take their place, then the plan."""
    from safetensors.torch import save_file

    graph = plain_graph(decision)
    large = {
        name: in_pairs(const.data.detach().cpu()).contiguous()
        for name, const in graph.constants.items()
        if const.type.numel > INLINE
    }
    record: dict[str, Any] = {"format": FORMAT, "version": VERSION, **graph_record(graph)}
    record["weights"] = weights_path(path).name if large else None
    record |= {"device": str(device), "environment": environment(device)}
    record |= {"target": decision.target.name, "policy": decision.policy.as_dict()}
    record |= {"mode": decision.mode, **_choices(decision)}
    with saving(path) as plan_file:  # both are complete before either takes its place
        plan_file.write_text(json.dumps(record, indent=1) + "\n")
        if large:
            with saving(weights_path(path)) as weights_file:
                save_file({k: v.clone() for k, v in large.items()}, weights_file)
    return path


def graph_record(graph: Graph) -> dict[str, Any]:
    """A graph as text that can be read in a file, and its digest."""
    text = print_graph(graph)
    return {"graph": text.split("\n"), "graph_sha256": hashlib.sha256(text.encode()).hexdigest()}


def plain_graph(decision: Decision) -> Graph:
    """The optimised graph before parts of concatenations were given places in the whole."""
    return decision.graph if decision.placed is None else decision.placed.plain


def _choices(decision: Decision) -> dict[str, Any]:
    """The part of a record that says how its regions run, and which concatenations are in place."""
    found: dict[str, Any] = {"regions": [_entry(choice) for choice in decision.choices]}
    if decision.placed is not None and decision.placed.wholes:
        found["in_place"] = record_of(decision.placed)
    return found


def _entry(choice: Choice) -> dict[str, Any]:
    c, region, option = choice.candidate, choice.region, choice.option
    entry: dict[str, Any] = {"nodes": [node.outputs[0] for node in region.nodes]}
    entry |= {"ops": " + ".join(region.ops), "engine": c.engine, "version": c.version}
    entry |= {"knobs": plain_knobs(c.knobs), "predicted_s": option.predicted_s}
    entry["measured_s"] = option.measured_s
    entry["sum"] = checksum(entry)
    return entry


def read_record(path: Path, format: str = FORMAT, version: int = VERSION) -> dict[str, Any]:
    """The JSON of a file, or a FileError that says what is wrong with it."""
    kind = format.removeprefix("deuteron-")
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        wrong, remedy = f"there is no such {kind} file", "name the file that save() wrote"
        raise FileError(wrong, remedy=remedy) from None
    except OSError as error:
        wrong = f"the {kind} file cannot be read: {error.strerror}"
        raise FileError(wrong, remedy="name the file that save() wrote") from None
    except (ValueError, RecursionError) as error:
        wrong = f"the {kind} file is cut short or not JSON: {error}"
        remedy = f"save the {kind} again; a half-written file cannot arise from save()"
        raise FileError(wrong, remedy=remedy) from None
    found = record.get("format") if isinstance(record, dict) else None
    if found != format:
        reader = READERS.get(str(found))
        remedy = f"{reader} reads it" if reader else f"{READERS[format]} reads what save() wrote"
        raise FileError(f"this is not a {kind} file", remedy=remedy)
    if record.get("version") != version:
        version_here = f"this Deuteron reads {version}"
        wrong = f"the {kind} file has version {record.get('version')}, {version_here}"
        raise FileError(wrong, remedy="save it again with this version")
    return dict(record)


def _read_graph(record: dict[str, Any], path: Path) -> Graph:
    tensors = load_tensors(weights_path(path)) if record.get("weights") else {}
    return read_graph(record, tensors, str(path))


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, or a FileError that says what is wrong with it."""
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except FileNotFoundError:
        raise FileError(f"the weights {path.name!r} are missing") from None
    except Exception as error:
        raise FileError(f"the weights {path.name!r} are damaged: {error}") from None


def read_graph(
    record: Mapping[str, Any], tensors: Mapping[str, torch.Tensor | Constant], where: str
) -> Graph:
    """The graph of a record (:func:`graph_record`), checked; ``tensors`` are its constants."""
    lines = record.get("graph")
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise FileError("the graph is missing")
    text = "\n".join(lines)
    if hashlib.sha256(text.encode()).hexdigest() != record.get("graph_sha256"):
        wrong = "the graph was edited or damaged (checksum differs)"
        raise FileError(wrong, remedy="save the plan again; to change a graph, build another one")
    try:
        return check(parse_graph(text, tensors), table.infer, "loading")
    except DeuteronError as error:
        raise error.at(where) from None
    except Exception as error:  # raised by an operator, about attributes that it never expected
        raise FileError(f"the graph is damaged: {type(error).__name__}: {error}") from None


def read_policy(record: dict[str, Any]) -> Policy:
    """The policy, complete: a limit that is missing or malformed must not silently become another
    one."""
    try:
        given, usual = record["policy"], Policy().as_dict()
        wrong = [name for name in {*given, *usual} if name not in given or name not in usual]
        wrong += [n for n, v in usual.items() if v is not None and type(given[n]) is not type(v)]
        if wrong:
            raise FileError(f"{wrong[0]!r} is missing, unknown or of another type")
        return Policy.from_dict(given)
    except (KeyError, TypeError, DeuteronError) as error:
        what = getattr(error, "wrong", None) or f"{type(error).__name__}: {error}"
        raise FileError(f"the policy is damaged: {what}") from None


def load_decision(path: Path, device: torch.device) -> Decision:
    """Read the decisions of a saved plan; those that are not valid here are made anew."""
    with reading(path):
        record = read_record(path)
        graph, policy = _read_graph(record, path), read_policy(record)
    survey = Survey(target(device), policy)
    return _decided_as(record, graph, graph, (), survey, device)


def chosen(decision: Decision, device: torch.device) -> dict[str, Any]:
    """Record what was decided about a graph, so that :func:`decide_as` can decide the same
    again."""
    record: dict[str, Any] = {"structure": _structure(plain_graph(decision))}
    record |= {"environment": environment(device), "mode": decision.mode}
    return record | _choices(decision)


def decide_as(
    record: Mapping[str, Any], source: Graph, device: torch.device, policy: Policy, weights: Weights
) -> Decision:
    """Decide as a record (:func:`chosen`) says, for the same graph with the same or other weights.
    If the passes turn it into a different graph here, decide anew."""
    survey = Survey(target(device), policy)
    graph, passes = run_passes(source, context(survey))
    graph = weights.planned(graph, source)
    decision = _decided_as(record, source, graph, passes, survey, device)
    measured = record.get("mode") == "found" and not decision.notes
    return replace(decision, mode="found" if measured else "heuristic")


def _structure(graph: Graph) -> str:
    """A digest that is equal for graphs that differ only in the values of their weights."""
    return hashlib.sha256(print_graph(graph, values=False).encode()).hexdigest()


def _decided_as(
    record: Mapping[str, Any],
    source: Graph,
    graph: Graph,
    passes: tuple[PassRecord, ...],
    survey: Survey,
    device: torch.device,
) -> Decision:
    """Make the decision of a record; choices that are not valid here are made anew."""
    pick, notes = heuristic(survey), list[str]()
    elsewhere = record.get("environment") != environment(device)
    if elsewhere:
        notes.append("the plan was made on another machine or with other library versions")
    if "structure" in record and record["structure"] != _structure(graph):
        regions, problem = list[Region](), "passes make another graph of it here"
    else:
        placed = as_recorded(graph, record.get("in_place"), survey.target)
        placed = replace(placed, graph=marked(placed.graph, survey.policy))
        regions, problem = _saved_regions(record, placed.graph)
    if problem:
        placed = Placed(graph, marked(graph, survey.policy))
    fused, vetoes = fuse(placed.graph, gates=survey.target.is_cuda)
    if problem:
        notes.append(f"{problem}; all regions were chosen anew")
        choices = [c for region in fused for c in choose(region, pick, survey)]
    else:
        choices = []
        for i, (region, entry) in enumerate(zip(regions, record["regions"], strict=True)):
            guess = pick(region)
            found = _restore(entry, survey, guess, elsewhere)
            if isinstance(found, str):
                notes.append(f"region {i}{found}; chosen anew: {guess.candidate}")
            choices.append(guess if isinstance(found, str) else found)
    passes = (*passes, pass_record(placed, 0.0))
    made = (source, placed.graph, survey.target, survey.policy, tuple(choices), vetoes, passes)
    return Decision(*made, "loaded", 0.0, tuple(notes), placed)


def _saved_regions(record: Mapping[str, Any], graph: Graph) -> tuple[list[Region], str]:
    """Return the regions of a record, made of the graph's nodes, and what is wrong with them, or
    ""."""
    place = {node.outputs[0]: i for i, node in enumerate(graph.nodes)}
    made = set(graph.inputs) | set(graph.constants)
    regions: list[Region] = []
    listed: list[int] = []
    try:
        for i, entry in enumerate(record["regions"]):
            places = [place[name] for name in entry["nodes"]]
            if not places or places != sorted(places):
                return [], f"region {i} is empty or not in an order that runs"
            listed += places
            nodes = [graph.nodes[p] for p in places]
            sub = graph.subgraph(f"r{i}", nodes)
            if any(v not in made for v in sub.inputs):
                return [], f"region {i} reads a value before it is made"
            made.update(v for _, v in sub.outputs)
            constants = frozenset(v for v in sub.inputs if v in graph.constants)
            regions.append(Region(sub, constants, heaviest(nodes)))
    except (KeyError, TypeError):
        return [], "the list of regions is damaged"
    if sorted(listed) != list(range(len(graph.nodes))):
        return [], "the regions do not cover every node once"
    return regions, ""


def _restore(entry: dict[str, Any], survey: Survey, guess: Choice, elsewhere: bool) -> Choice | str:
    """Return the choice that a file has for the region of ``guess``, or a text that says why it is
    not available here."""
    try:
        intact = entry["sum"] == checksum(entry)
        wanted = (entry["engine"], entry["version"], knobs_key(entry["knobs"]))
        measured = entry["measured_s"]
        intact = intact and (measured is None or type(measured) in (int, float))
    except (KeyError, TypeError, ValueError):
        intact = False
    if not intact:
        return " was edited or damaged"
    for option in survey.ask(guess.region)[0]:
        c = option.candidate
        if (c.engine, c.version, knobs_key(c.knobs)) == wanted and not option.rejected:
            known = None if elsewhere else measured
            return replace(guess, option=replace(option, measured_s=known))
    return f": {wanted[0]} (version {wanted[1]}) does not offer this candidate here"
