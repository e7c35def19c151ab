"""Measurements remembered as text: one line each, mergeable, diffable, checked line by line.

A line is a JSON object with the region's key and text, the environment it was measured in
(device, driver, library versions, threads), the policy that matters to numbers, and what every
candidate took. A line that is cut short or edited is recognised by its checksum and set aside in
a file of its own; the rest is still used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from deuteron.errors import FileError
from deuteron.files import cache_dir, locked, write_atomic
from deuteron.policy import Policy
from deuteron.target import cpu_identity

FORMAT = 1
FILE = "measurements.jsonl"
Rows = list[dict[str, Any]]  # what each candidate of a region took


@lru_cache
def _environment(kind: str, index: int, threads: int) -> dict[str, Any]:
    if kind == "cuda":
        props = torch.cuda.get_device_properties(index)
        driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
        gpu = {"device": props.name, "driver": str(driver), "triton": installed("triton")}
        return gpu | {"torch": torch.__version__, "cudnn": str(torch.backends.cudnn.version())}
    return {"device": "cpu", **cpu_identity(), "llvmlite": installed("llvmlite")}


def installed(package: str) -> str:
    """The version of a package that compiles our kernels, found without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def environment(device: torch.device) -> dict[str, Any]:
    """What a measurement depends on besides the region itself."""
    return _environment(device.type, device.index or 0, torch.get_num_threads())


def policy_key(policy: Policy) -> dict[str, Any]:
    """The part of a policy that changes which candidates may win."""
    names = ("deterministic", "max_error", "max_workspace", "max_packed", "float32")
    only = {} if policy.engines is None else {"engines": list(policy.engines)}
    return {name: getattr(policy, name) for name in names} | only


def plain_knobs(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Knobs as they come back from a file: tuples become lists, other objects their text."""
    plain: dict[str, Any] = json.loads(json.dumps(dict(knobs), default=str))
    return plain


def knobs_key(knobs: Mapping[str, Any]) -> str:
    """Equal for equal knobs, whether they come from an engine or from a file."""
    return json.dumps(dict(knobs), sort_keys=True, default=str)


def checksum(entry: Mapping[str, Any]) -> str:
    body = {k: v for k, v in entry.items() if k != "sum"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


@dataclass
class Cache:
    """The measurements of one file, which is read when this object is made; a missing file counts
    as empty. ``problems`` lists lines that could not be used, and why."""

    path: Path
    entries: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)
    problems: list[str] = field(default_factory=list, init=False)
    damaged: list[bytes] = field(default_factory=list, init=False)
    fresh: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)
    readable: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self.path = Path(self.path)
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            self.problems.append(f"{self.path.name}: {error.strerror}")
            self.readable = False
            return
        for number, line in enumerate(data.split(b"\n"), 1):
            if line.strip():
                self._take(number, line)

    @staticmethod
    def open(path: str | Path | None = None) -> Cache:
        """Open a cache file, by default that of this user."""
        return Cache(Path(path) if path is not None else cache_dir() / FILE)

    def _take(self, number: int, line: bytes) -> None:
        where = f"{self.path.name} line {number}"
        try:
            entry = json.loads(line.decode())
            if isinstance(entry.get("format"), int) and entry["format"] != FORMAT:
                self.problems.append(f"{where}: format {entry['format']}, this is {FORMAT}")
                self.entries[f"kept {checksum(entry)}"] = entry  # for the version that wrote it
                return
            good = entry["sum"] == checksum(entry) and all(map(_sound, entry["options"]))
            key = _key(entry["region"], entry["environment"], entry["policy"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            self.problems.append(f"{where}: cut short or not JSON")
            self.damaged.append(line)
            return
        if good:
            self.entries[key] = entry
        else:
            self.problems.append(f"{where}: edited or damaged (checksum differs)")
            self.damaged.append(line)

    def get(self, region: str, device: torch.device, policy: Policy) -> Rows | None:
        """What was measured for this region here, or None."""
        entry = self.entries.get(_key(region, environment(device), policy_key(policy)))
        return entry["options"] if entry is not None else None

    def put(
        self, region: str, text: str, device: torch.device, policy: Policy, options: Rows
    ) -> None:
        """Remember measurements; they reach the file at :meth:`save`."""
        entry: dict[str, Any] = {"format": FORMAT, "region": region, "text": text}
        entry |= {"environment": environment(device), "policy": policy_key(policy)}
        entry["options"] = options
        entry["sum"] = checksum(entry)
        key = _key(region, entry["environment"], entry["policy"])
        self.entries[key] = self.fresh[key] = entry

    def save(self) -> None:
        """Merge what is new into the file, under a lock and by rename. Bad lines move to a
        file beside it, so that nothing is lost. A cache that cannot be written is not fatal."""
        if not self.fresh:
            return
        try:
            with locked(self.path):
                on_disk = Cache(self.path)
                if not on_disk.readable:  # writing would lose what is in there
                    self.problems.append(f"{self.path.name}: not written, as it cannot be read")
                    return
                if on_disk.damaged:
                    aside = self.path.with_suffix(".damaged.jsonl")
                    old = aside.read_bytes() if aside.exists() else b""
                    write_atomic(aside, old + b"".join(line + b"\n" for line in on_disk.damaged))
                merged = {**on_disk.entries, **self.fresh}
                lines = sorted(json.dumps(entry, sort_keys=True) for entry in merged.values())
                write_atomic(self.path, "".join(f"{line}\n" for line in lines))
            self.entries = merged
            self.fresh = {}
        except OSError as error:
            self.problems.append(f"{self.path.name}: not written ({error.strerror})")

    def merge(self, other: str | Path) -> int:
        """Take over the entries of another cache file; how many were new."""
        if not Path(other).exists():
            raise FileError(f"there is no cache file {str(other)!r}")
        found = Cache.open(other).entries
        if not found and Path(other).stat().st_size:
            remedy = "name the folder of a cache, or its measurements.jsonl"
            raise FileError(f"no measurement can be read in {str(other)!r}", remedy=remedy)
        new = {k: v for k, v in found.items() if k not in self.entries}
        self.fresh.update(new)
        self.entries.update(new)
        self.save()
        return len(new)


def _sound(row: Mapping[str, Any]) -> bool:
    """Whether one measurement has the fields that a plan reads, of the right types."""
    texts = all(isinstance(row[name], str) for name in ("engine", "version", "rejected"))
    numbers = all(
        row[name] is None or (type(row[name]) in (int, float) and row[name] >= 0)
        for name in ("seconds", "error", "torch_error")
    )
    whole = isinstance(row["knobs"], dict) and isinstance(row["reference"], str)
    whole = whole and type(row.get("workspace", 0)) is int  # which older files do not have
    return texts and numbers and whole


def _key(region: str, env: Mapping[str, Any], policy: Mapping[str, Any]) -> str:
    return json.dumps([region, dict(env), dict(policy)], sort_keys=True)
