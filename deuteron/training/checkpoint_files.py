"""Readers for checkpoints of torch.distributed.checkpoint that never run code from the files.

The index of a checkpoint is a pickle, and so is everything in it besides tensors. Here the index
may only name classes that torch itself writes there (WRITTEN), and all other pickles are loaded
with ``weights_only=True``.
"""

from __future__ import annotations

import io
import pickle
from pathlib import PurePath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import StorageMeta

WRITTEN = {
    metadata.__name__: {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
        *("BytesStorageMetadata", "ChunkStorageMetadata", "TensorStorageMetadata"),
    },
    filesystem.__name__: {"_StorageInfo"},
    "torch": {"Size", *(n for n, v in vars(torch).items() if isinstance(v, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"},
}


class _Index(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in WRITTEN.get(module.removesuffix("._local"), ()):
            raise pickle.UnpicklingError(f"the index names {module}.{name}, which torch does not")
        return super().find_class(module, name)


class Reader(filesystem.FileSystemReader):
    """torch's reader, except that loading the index runs no code, and that the index may only name
    files in its own folder."""

    def read_metadata(self, *args: Any, **named: Any) -> Any:
        path = self._get_metadata_path(named.get("rank"))
        with self.fs.create_stream(path, "rb") as stream:
            found = _Index(stream).load()
        for kept in (found.storage_data or {}).values():
            name = getattr(kept, "relative_path", "")
            if not isinstance(name, str) or name != PurePath(name).name:
                raise pickle.UnpicklingError(f"the index names {name!r}, which is not beside it")
        found.storage_meta = found.storage_meta or StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class Planner(DefaultLoadPlanner):
    """torch's planner, except that a pickle may only hold what files of weights may hold: numbers,
    strings, tensors, and containers of these."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        held = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), held)
        held.seek(0)
        super().load_bytes(read_item, held)
