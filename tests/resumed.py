"""What the processes of test_checkpoints.py run: ranks that train a case, keep checkpoints, and go
on from the last one that is there.

``python -m tests.resumed RANK RANKS FOLDER CASE EVERY LAST [BATCH SECONDS]``: with a batch and
seconds the process is killed so long after it began that batch, wherever it is by then.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import deuteron as dt
from tests.ranks import Case, Trainer, meet

PAUSE_S = 0.01  # for each batch, so that there is time to be killed in


def main(
    rank: int, ranks: int, folder: Path, case: Case, every: int, last: int, dies: list[str]
) -> None:
    """Train up to batch ``last``, with a checkpoint after each ``every`` batches."""
    if ranks > 1:
        meet(rank, ranks, str(folder))
    torch.set_num_threads(1)
    trainer = Trainer(case, ranks)
    kept = dt.Checkpoints(folder.parent / "kept", trainer.step)
    begin = kept.load()
    print(f"begins at {begin}", flush=True)
    for i in range(begin, last):
        if dies and i == int(dies[0]):
            kill = (os.getpid(), signal.SIGKILL)
            threading.Timer(float(dies[1]), os.kill, kill).start()
        trainer.train(i)
        time.sleep(PAUSE_S)
        if (i + 1) % every == 0:
            kept.save(i + 1)
    kept.wait()
    state = trainer.state()
    if rank == 0:
        torch.save(state, folder / "state.pt")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    rank, ranks, folder, name, every, last, *dies = sys.argv[1:]
    main(int(rank), int(ranks), Path(folder), Case.of(name), int(every), int(last), dies)
