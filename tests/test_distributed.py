"""Processes that train together through torch.distributed: the same parameters as one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from tests import ranks
from tests.tolerances import SINGLE, SINGLE_LAYERS

RANKS = 2


def test_two_ranks_train_as_one(tmp_path):
    """DistributedDataParallel around a model, run by the backend and by dt.train_step: gradients
    are averaged over the ranks before they are clipped and used."""
    script = [sys.executable, "-m", "tests.ranks"]
    here = Path(ranks.__file__).parent.parent
    running = [
        subprocess.Popen([*script, str(rank), str(RANKS), str(tmp_path)], cwd=here)
        for rank in range(RANKS)
    ]
    alone = ranks.trained("eager")
    assert [process.wait(240) for process in running] == [0] * RANKS
    near = {"rtol": SINGLE_LAYERS, "atol": SINGLE}
    for rank in range(RANKS):
        for way, params in torch.load(tmp_path / f"rank{rank}.pt").items():
            for got, want in zip(params, alone, strict=True):
                torch.testing.assert_close(got, want, **near, msg=lambda m, way=way: f"{way}: {m}")
