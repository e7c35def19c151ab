"""Checkpoints of a training step, from which any number of ranks can resume.

torch.distributed.checkpoint decides what is written and by which rank: every rank writes the parts
that it has, and reads the parts that it needs. This module makes that safe against a process that
dies at any moment: a checkpoint is first written into a folder whose name ends in ``.part``, and
the folder is renamed when all ranks are done. A checkpoint that is to be deleted is renamed before
that, too. So every folder without an ending is complete.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from deuteron.errors import BindError, EngineError, FileError
from deuteron.kinds import checked
from deuteron.training.ranks import lost_ranks_named

if TYPE_CHECKING:
    from deuteron.training.step import TrainStep

NAME = re.compile(r"step-(\d{8,})")
# Endings of folders: one that is being written, one that waits for its successor of the same
# number, and one that is being deleted.
PART, OLD, GONE = ".part", ".old", ".gone"
ASKED = "a checkpoint of a training step"


class Checkpoints:
    """Saves a training step to a folder that all ranks can see, and restores it from there.

    >>> kept = dt.Checkpoints("runs/first", step)
    >>> begin = kept.load()              # how many batches there were, 0 if there is no checkpoint
    >>> for i, (x, y) in enumerate(loader, begin):
    ...     step(x, y)
    ...     if (i + 1) % 1000 == 0:
    ...         kept.save(i + 1)         # with several ranks written in the background
    >>> kept.wait()

    All ranks must call :meth:`save` and :meth:`load` at the same point of the program. A checkpoint
    restores parameters, optimiser state, running statistics, loss scale and the count of skipped
    steps on any number of ranks. The states of random generators are saved for each rank, and
    restored only if as many ranks resume as saved. ``keep``: how many complete checkpoints to keep;
    older ones are deleted.
    """

    @checked("step", "keep", name="Checkpoints")
    def __init__(self, folder: str | Path, step: TrainStep, keep: int = 2) -> None:
        if not callable(getattr(step, "load_state_dict", None)) or not hasattr(step, "optimizer"):
            wrong = f"step is a {type(step).__name__}, not a training step"
            raise BindError(wrong, asked=ASKED, remedy="make one: dt.train_step(…)")
        if type(keep) is not int or keep < 1:
            raise FileError(f"keep={keep!r}", asked=ASKED, remedy="keep at least one")
        self.folder, self.step, self.keep = Path(folder), step, keep
        several = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if several else 0
        self.ranks = dist.get_world_size() if several else 1
        # saving runs while training goes on, so its collectives need a group of their own
        self.group = dist.new_group(backend="gloo") if self.ranks > 1 else None
        self.saving: tuple[int, Future[Any]] | None = None
        if self.folder.exists() and not self.folder.is_dir():
            wrong = f"{str(self.folder)!r} is a file, not a folder"
            raise FileError(wrong, asked=ASKED, remedy="name a folder, or none that there is yet")
        self._first(self._tidy)

    def _tidy(self) -> None:
        """Make the folder, and finish there what a process that died had begun."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob(f"step-*{OLD}"):
            if not old.with_suffix("").exists():
                old.rename(old.with_suffix(""))
            else:
                old.rename(old.with_suffix(GONE))
        for gone in self.folder.glob(f"step-*{GONE}"):
            shutil.rmtree(gone, ignore_errors=True)

    # ---- saving

    @lost_ranks_named(ASKED)
    def save(self, batches: int, wait: bool = False) -> None:
        """Save the state after so many ``batches``. One rank alone writes it in this call. Several
        copy it in this call, and go on to write it in the background unless ``wait`` is set. A
        checkpoint that is still being written is finished first."""
        from torch.distributed.checkpoint import state_dict_saver as saver

        if not isinstance(batches, int) or batches < 0:
            wrong = f"{batches!r} is no number of batches"
            raise BindError(wrong, asked=f"save({batches!r})", remedy="count them from 0 on")
        self.wait()
        part = self.folder / f"step-{batches:08d}{PART}"

        def begin() -> None:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)

        self._first(begin)
        state = self._state(self.ranks)
        how: Any = {"checkpoint_id": str(part), "process_group": self.group}
        if self.ranks == 1:
            with self._written():
                saver.save(state, checkpoint_id=str(part), no_dist=True)
            self._finish(batches)
            return
        made: Any = saver.async_save(state, **how)
        self.saving = batches, made
        if wait:
            self.wait()

    @lost_ranks_named(ASKED)
    def wait(self) -> None:
        """Wait until all ranks have written the last checkpoint."""
        if self.saving is not None:
            batches, made = self.saving
            self.saving = None
            with self._written():
                made.result()
            self._finish(batches)

    def _finish(self, batches: int) -> None:
        """Rename a checkpoint that this rank has written, after all others have, and remove those
        that are too old to keep."""
        part = self.folder / f"step-{batches:08d}{PART}"

        def end() -> None:
            name = part.with_suffix("")
            if name.exists():
                name.rename(name.with_suffix(OLD))
            part.rename(name)
            for old in self.whole()[: -self.keep]:
                (self.folder / f"step-{old:08d}").rename(self.folder / f"step-{old:08d}{GONE}")
            self._tidy()

        if self.group is not None:
            dist.barrier(self.group)
        self._first(end)

    # ---- loading

    def whole(self) -> list[int]:
        """The complete checkpoints in the folder, each as its number of batches, in order."""
        found = (NAME.fullmatch(p.name) for p in self.folder.glob("step-*") if p.is_dir())
        return sorted(int(name[1]) for name in found if name is not None)

    @lost_ranks_named(ASKED)
    def load(self, batches: int | None = None) -> int:
        """Restore a checkpoint, the last complete one unless ``batches`` names another, and return
        the number of batches that it was saved after. If there is none, return 0 and change
        nothing."""
        from torch.distributed.checkpoint.state_dict import set_state_dict

        self.wait()
        there = self.whole()
        if batches is None and not there:
            return 0
        chosen = there[-1] if batches is None else batches
        if chosen not in there:
            wrong = f"there is no whole checkpoint after {chosen} batches in {str(self.folder)!r}"
            remedy = f"name one of those that there are, {there}, or none for the last of them"
            if not there:
                remedy = "name the folder that save() wrote to; without a number load() answers 0"
            raise FileError(wrong, asked=f"load({chosen!r})", remedy=remedy)
        state, before = self._read(self.folder / f"step-{chosen:08d}")
        step = self.step
        model = state["model"]
        set_state_dict(
            step.model, step.optimizer, model_state_dict=model, optim_state_dict=state["optimizer"]
        )
        own = dict(state["rank"][str(min(self.rank, before - 1))])
        if before != self.ranks:
            own["generators"] = step._generators()
        step.load_state_dict(own)
        return chosen

    def _read(self, path: Path) -> tuple[dict[str, Any], int]:
        """Read a checkpoint; return what it holds and how many ranks saved it. It is read into
        copies, so that a checkpoint that cannot be read leaves model and optimiser unchanged."""
        from torch.distributed.checkpoint import state_dict_loader as loader
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.utils._pytree import tree_map_only

        from deuteron.training.checkpoint_files import Planner, Reader

        how: Any = {"process_group": self.group, "no_dist": self.ranks == 1}
        try:
            reader = Reader(str(path))
            kept = reader.read_metadata().state_dict_metadata
            before = sum(name.startswith("rank.") and name.endswith("skipped") for name in kept)
            state = tree_map_only(torch.Tensor, torch.clone, self._state(before))
            with lost_ranks_named(ASKED):
                loader.load(state, storage_reader=reader, planner=Planner(), **how)
        except EngineError:
            raise
        except (Exception, CheckpointException) as error:
            failures = getattr(error, "failures", {})
            cause = next(iter(failures.values()))[0] if failures else error
            # only torch's first sentence: the next advises to load without a check, which is unsafe
            said = str(cause).split("\n")[0].split(". ")[0]
            wrong = f"{str(path)!r} cannot be read: {type(cause).__name__} {said}".rstrip()
            others = [n for n in self.whole() if f"step-{n:08d}" != path.name]
            remedy = f"go on from an older one: load({others[-1]})" if others else ""
            if isinstance(cause, RuntimeError | ValueError | KeyError):  # of another model, say
                same = "make the model and the optimiser as they were when it was saved"
                remedy = f"{same}; or {remedy}" if remedy else same
            remedy = remedy or f"begin anew, in another folder or without {path.name!r}"
            raise FileError(wrong, asked=ASKED, remedy=remedy) from error
        return state, before

    def _state(self, ranks: int) -> dict[str, Any]:
        """The present state, arranged as torch.distributed.checkpoint wants it. Under "rank" it has
        what is this rank's own, under its number among so many ``ranks``, or under that of the
        last, if this rank's is greater: a checkpoint of fewer ranks has no part for it."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.step.model, self.step.optimizer)
        own: Mapping[str, Any] = self.step.state_dict()
        place = str(min(self.rank, ranks - 1))
        return {"model": model, "optimizer": optimizer, "rank": {place: own}}

    @contextmanager
    def _written(self) -> Iterator[None]:
        """While it is open, turn torch's error for a rank that could not write into one that says
        why."""
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            yield
        except CheckpointException as error:
            causes = (cause for cause, _ in error.failures.values())
            cause = next((cause for cause in causes if isinstance(cause, OSError)), None)
            if cause is None:
                raise
            raise self._cannot_be_written(cause.strerror or str(cause)) from error

    def _cannot_be_written(self, why: str) -> FileError:
        wrong = f"the folder {str(self.folder)!r} cannot be written: {why}"
        remedy = "name a folder on a disk with room, that this user may write to"
        return FileError(wrong, asked=ASKED, remedy=remedy)

    def _first(self, work: Callable[[], None]) -> None:
        """Let rank 0 do ``work`` on the folder while the others wait. If it fails, all ranks raise
        an error; otherwise the others would wait for a rank that is gone."""
        said: list[str | None] = [None]
        if self.rank == 0:
            try:
                work()
            except OSError as error:
                said = [error.strerror or str(error)]
        if self.group is not None:
            dist.broadcast_object_list(said, 0, self.group)
        if said[0] is not None:
            raise self._cannot_be_written(said[0])
