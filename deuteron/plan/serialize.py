"""Plans as files: readable JSON, weights beside it. Files are data: parsed, checked, never run.

A plan file holds the optimised graph as text, the policy, and one entry per region with the
candidate that runs it. When it is loaded, an entry whose engine is gone, has another version,
no longer offers that candidate, or was chosen on another device is chosen anew, and the plan's
notes say so; the graph and the weights must be intact.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from deuteron.errors import DeuteronError, FileError
from deuteron.files import replacing
from deuteron.ir.graph import Graph
from deuteron.ir.region import Region
from deuteron.ir.spec import check
from deuteron.ir.text import INLINE, in_pairs, parse_graph, print_graph
from deuteron.ops import table
from deuteron.passes import fuse
from deuteron.plan.cache import checksum, environment, knobs_key, plain_knobs
from deuteron.plan.choose import Choice, Survey, choose, heaviest, heuristic
from deuteron.plan.decide import Decision
from deuteron.policy import Policy
from deuteron.target import target

FORMAT = "deuteron-plan"
VERSION = 1


def weights_path(path: Path) -> Path:
    """Where the weights of the plan at ``path`` lie: the same name, .safetensors."""
    stem = path.name.removesuffix(".json").removesuffix(".plan")
    return path.with_name(f"{stem}.safetensors")


def save_decision(decision: Decision, device: torch.device, path: Path) -> Path:
    """Written under other names first; then the weights take their place, then the plan."""
    from safetensors.torch import save_file

    graph = decision.graph
    large = {
        name: in_pairs(const.data.detach().cpu()).contiguous()
        for name, const in graph.constants.items()
        if const.type.numel > INLINE
    }
    text = print_graph(graph)
    digest = hashlib.sha256(text.encode()).hexdigest()
    record: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    record |= {"graph": text.split("\n"), "graph_sha256": digest}
    record["weights"] = weights_path(path).name if large else None
    record |= {"device": str(device), "environment": environment(device)}
    record |= {"target": decision.target.name, "policy": decision.policy.as_dict()}
    record |= {"mode": decision.mode, "regions": [_entry(choice) for choice in decision.choices]}
    with replacing(path) as plan_file:  # both are complete before either takes its place
        plan_file.write_text(json.dumps(record, indent=1) + "\n")
        if large:
            with replacing(weights_path(path)) as weights_file:
                save_file({k: v.clone() for k, v in large.items()}, weights_file)
    return path


def _entry(choice: Choice) -> dict[str, Any]:
    c, region, option = choice.candidate, choice.region, choice.option
    entry: dict[str, Any] = {"nodes": [node.outputs[0] for node in region.nodes]}
    entry |= {"ops": " + ".join(region.ops), "engine": c.engine, "version": c.version}
    entry |= {"knobs": plain_knobs(c.knobs), "predicted_s": option.predicted_s}
    entry["measured_s"] = option.measured_s
    entry["sum"] = checksum(entry)
    return entry


def read_record(path: Path) -> dict[str, Any]:
    """The JSON of a plan file, or a FileError that says what is wrong with it."""
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        raise FileError("there is no such plan file") from None
    except OSError as error:
        raise FileError(f"the plan file cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        wrong = f"the plan file is cut short or not JSON: {error}"
        remedy = "save the plan again; a half-written file cannot arise from save()"
        raise FileError(wrong, remedy=remedy) from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise FileError("this is not a plan file", remedy="see Plan.save")
    if record.get("version") != VERSION:
        wrong = f"the plan file has version {record.get('version')}, this Deuteron reads {VERSION}"
        raise FileError(wrong, remedy="save it again with this version")
    return record


def _read_graph(record: dict[str, Any], path: Path) -> Graph:
    lines = record.get("graph")
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise FileError("the graph is missing")
    text = "\n".join(lines)
    if hashlib.sha256(text.encode()).hexdigest() != record.get("graph_sha256"):
        wrong = "the graph was edited or damaged (checksum differs)"
        raise FileError(wrong, remedy="save the plan again; to change a graph, build another one")
    tensors: dict[str, torch.Tensor] = {}
    if record.get("weights"):
        beside = weights_path(path)
        try:
            from safetensors.torch import load_file

            tensors = load_file(beside)
        except FileNotFoundError:
            raise FileError(f"the weights {beside.name!r} are missing") from None
        except Exception as error:
            raise FileError(f"the weights {beside.name!r} are damaged: {error}") from None
    try:
        return check(parse_graph(text, tensors), table.infer, "loading")
    except DeuteronError as error:
        raise error.at(str(path)) from None
    except Exception as error:  # what an operator says of attributes it never expected
        raise FileError(f"the graph is damaged: {type(error).__name__}: {error}") from None


def _read_policy(record: dict[str, Any]) -> Policy:
    """The policy, whole: a limit that is missing or odd must not silently be another one."""
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
    """A saved plan's decisions, each still valid here or made anew."""
    try:
        record = read_record(path)
        graph, policy = _read_graph(record, path), _read_policy(record)
    except FileError as error:
        error.asked = f"load {str(path)!r}"
        raise
    here = target(device)
    survey = Survey(here, policy)
    pick = heuristic(survey)
    notes: list[str] = []
    elsewhere = record.get("environment") != environment(device)
    if elsewhere:
        notes.append("the plan was made on another machine or with other library versions")
    regions, problem = _saved_regions(record, graph)
    fused, vetoes = fuse(graph)
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
    made = (graph, graph, here, policy, tuple(choices), vetoes, ())
    return Decision(*made, "loaded", 0.0, tuple(notes))


def _saved_regions(record: dict[str, Any], graph: Graph) -> tuple[list[Region], str]:
    """The regions of the file over the graph's nodes, or what is wrong with them."""
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
    """What the file chose in the place of a guess, or why it is not to be had here."""
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
