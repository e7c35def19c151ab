"""What the processes of test_checkpoints.py run: ranks that train a case, keep checkpoints, and go on
from the last one that is there.

``python -m tests.resumed RANK RANKS FOLDER CASE EVERY LAST``
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

import deuteron as dt
from tests.ranks import Case, Trainer, meet


def main(rank: int, ranks: int, folder: Path, case: Case, every: int, last: int) -> None:
    """Train up to batch ``last``, with a checkpoint after each ``every`` batches."""
    if ranks > 1:
        meet(rank, ranks, str(folder))
    torch.set_num_threads(1)
    trainer = Trainer(case, ranks)
    kept = dt.Checkpoints(folder.parent / "kept", trainer.step)
    begin = kept.load()
    print(f"begins at {begin}", flush=True)
    for i in range(begin, last):
        trainer.train(i)
        if (i + 1) % every == 0:
            kept.save(i + 1)
        print(f"batch {i + 1}", flush=True)
    kept.wait()
    state = trainer.state()
    if rank == 0:
        torch.save(state, folder / "state.pt")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    rank, ranks, folder, name, every, last = sys.argv[1:]
    main(int(rank), int(ranks), Path(folder), Case.of(name), int(every), int(last))
