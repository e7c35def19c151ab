"""Checkpoints of ranks that train together: resumed on other numbers of ranks, and after a rank
was killed at any moment."""

from __future__ import annotations

import errno
import pickle
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import filesystem

import deuteron as dt
from tests import ranks
from tests.ranks import Case
from tests.resumed import PAUSE_S
from tests.tolerances import DOUBLE_TRAINED

HERE = Path(__file__).parent.parent
WAIT_S = 600
BOUND_S = 60  # within which all ranks end after one is gone


def start(
    folder: Path, count: int, case: Case, every: int, last: int, dies: tuple[int, int, float] = ()
) -> list[subprocess.Popen]:
    """Ranks that go on from the last checkpoint beside ``folder`` up to batch ``last``. ``dies``:
    which rank is killed, in which batch, and how many seconds after it began."""
    folder.mkdir(parents=True)
    rest = [str(count), str(folder), case.name, str(every), str(last)]
    more = {dies[0]: [str(dies[1]), str(dies[2])]} if dies else {}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.resumed", str(rank), *rest, *more.get(rank, [])],
            cwd=HERE,
            stdout=(folder / f"out{rank}").open("w"),
            stderr=(folder / f"err{rank}").open("w"),
        )
        for rank in range(count)
    ]


def finish(running: list[subprocess.Popen], folder: Path) -> dict[str, torch.Tensor]:
    try:
        codes = [process.wait(WAIT_S) for process in running]
    finally:
        for process in running:
            process.kill()
    told = "".join(path.read_text()[-2000:] for path in sorted(folder.glob("err*")))
    assert codes == [0] * len(codes), told
    return torch.load(folder / "state.pt")


def assert_same(found: dict[str, torch.Tensor], case: Case) -> None:
    alone = ranks.trained(case._replace(layout="alone", way="eager"))
    for name, want in alone.items():
        near = {"rtol": DOUBLE_TRAINED, "atol": DOUBLE_TRAINED}
        torch.testing.assert_close(found[name], want, **near, msg=lambda m, n=name: f"{n}: {m}")


def test_a_process_alone_goes_on_bit_for_bit(tmp_path):
    def trained(last: int, resume: bool) -> tuple[nn.Module, int]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        optimizer = dt.optim.AdamW(model.parameters(), lr=0.1)
        x, y = torch.randn(6, 4), torch.randn(6, 2)
        step = dt.train_step(model, nn.functional.mse_loss, optimizer, (x, y))
        kept = dt.Checkpoints(tmp_path / "kept", step, keep=1)
        begin = kept.load() if resume else 0
        for i in range(begin, last):
            step(x, y)
            if i + 1 in (1, 2):
                kept.save(i + 1)
        return model, begin

    whole, _ = trained(4, resume=False)
    (tmp_path / "kept" / "step-00000009.part").mkdir()  # left behind by one that died
    resumed, begin = trained(4, resume=True)
    assert begin == 2 and [p.name for p in (tmp_path / "kept").glob("step-*[0-9]")] == [
        "step-00000002"
    ]
    for got, want in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(got, want)
    with pytest.raises(dt.FileError, match=r"no whole checkpoint after 9(.*\n)*.*name one of"):
        step = dt.train_step(resumed, None, torch.optim.SGD(resumed.parameters()), (whole,))
        dt.Checkpoints(tmp_path / "kept", step).load(9)


class Killed(BaseException):
    """Stands for a process that dies: nothing after it runs."""


@pytest.mark.parametrize("at", range(6))
def test_what_has_a_name_is_whole_wherever_a_process_dies(at, tmp_path, monkeypatch):
    """Killed at each change of the folder while a checkpoint replaces one of the same number and
    others are too old to keep."""
    model = nn.Linear(2, 2)
    step = dt.train_step(
        model,
        nn.functional.mse_loss,
        torch.optim.SGD(model.parameters(), lr=0.1),
        (torch.ones(1, 2), torch.ones(1, 2)),
    )
    kept = dt.Checkpoints(tmp_path, step, keep=2)
    for number in (1, 2, 3):
        kept.save(number)
    assert kept.whole() == [2, 3]
    kept.keep, left = 1, at
    renamed, removed = Path.rename, shutil.rmtree

    def counted(change):
        def changes(path, *rest, **how):
            nonlocal left
            own = Path(path).name.startswith("step-")  # not the files that torch writes inside
            left -= own and (change is renamed or not str(path).endswith(".part"))
            if left < 0:
                raise Killed
            return change(path, *rest, **how)

        return changes

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Path, "rename", counted(renamed))
        patched.setattr(shutil, "rmtree", counted(removed))
        kept.save(3)
    again = dt.Checkpoints(tmp_path, step, keep=1)
    for number in again.whole():
        assert again.load(number) == number
    assert again.whole()[-1] == 3 and not [*tmp_path.glob("*.old"), *tmp_path.glob("*.gone")]


@pytest.mark.sweep
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "sp"])
@pytest.mark.parametrize("optimizer", ["ours", "adamw"])
def test_four_ranks_go_on_as_two_and_as_one(layout, optimizer, tmp_path):
    case = Case("gpt", layout, "step", optimizer, 1, 6)
    finish(start(tmp_path / "four", 4, case, 2, 2), tmp_path / "four")
    finish(start(tmp_path / "two", 2, case, 2, 4), tmp_path / "two")
    alone = case._replace(layout="alone")
    assert_same(finish(start(tmp_path / "one", 1, alone, 2, 6), tmp_path / "one"), case)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(20))
def test_a_rank_that_is_killed_ends_the_others(seed, tmp_path):
    """At a random moment of 30 batches, with a checkpoint after every second one: the others end
    in time and say why, and who goes on from the last whole checkpoint ends as if nothing had
    been."""
    case = Case("gpt", ("ddp", "fsdp")[seed % 2], "step", "ours", 1, 30)
    draw = random.Random(seed)
    victim = draw.randrange(2)
    first, second = tmp_path / "first", tmp_path / "second"
    dies = victim, draw.randrange(2, 25), draw.random() * 4 * PAUSE_S
    running = start(first, 2, case, 2, 30, dies)
    assert running[victim].wait(WAIT_S) == -signal.SIGKILL
    try:
        assert running[1 - victim].wait(BOUND_S) != 0
    finally:
        running[1 - victim].kill()
    assert "another rank is gone" in (first / f"err{1 - victim}").read_text()
    assert_same(finish(start(second, 2, case, 2, 30), second), case)
    begun = int((second / "out0").read_text().split()[-1])
    assert dies[1] - 3 <= begun <= dies[1] + 8  # with the last checkpoint that can have been whole


@pytest.mark.parametrize("way", ["making it", "its parts"])
def test_a_folder_that_cannot_be_written_is_named(way, tmp_path, monkeypatch):
    """By the rank that makes it, or while parts are written; and what was kept before stays."""
    model, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = dt.train_step(model, torch.nn.functional.mse_loss, optimizer, (x, x[:, :2]))
    kept = dt.Checkpoints(tmp_path / "kept", step)
    kept.save(1)

    def full(*given, **named):
        raise OSError(errno.ENOSPC, "No space left on device")

    place = (Path, "mkdir") if way == "making it" else (filesystem.FileSystemWriter, "write_data")
    with monkeypatch.context() as broken, pytest.raises(dt.FileError) as raised:
        broken.setattr(*place, full)
        kept.save(2)
    assert "kept' cannot be written: No space left on device" in str(raised.value)
    assert kept.whole() == [1] and kept.load() == 1


class Runs:
    """A pickle that calls something when it is read."""

    def __reduce__(self):
        return (print, ("read",))


def cut(path: Path) -> None:
    (data,) = path.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:50])


def pointed_outside(path):
    """An index whose names lead out of the folder."""
    index = pickle.loads((path / ".metadata").read_bytes())
    for kept in index.storage_data.values():
        kept.relative_path = f"../step-00000001/{kept.relative_path}"
    (path / ".metadata").write_bytes(pickle.dumps(index))


BROKEN = {
    "cut": cut,
    "no index": lambda path: (path / ".metadata").unlink(),
    "names that lead outside": pointed_outside,
    "garbage": lambda path: (path / ".metadata").write_bytes(b"garbage"),
    "an index that runs": lambda path: (path / ".metadata").write_bytes(pickle.dumps(Runs())),
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_cannot_be_read_changes_nothing_and_runs_nothing(how, tmp_path, capsys):
    torch.manual_seed(0)
    model, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    optimizer = dt.optim.AdamW(model.parameters(), lr=0.1)
    step = dt.train_step(model, torch.nn.functional.mse_loss, optimizer, (x, x[:, :2]))
    kept = dt.Checkpoints(tmp_path, step)
    for n in (1, 2):
        step(x, x[:, :2])
        kept.save(n, wait=True)
    step(x, x[:, :2])
    BROKEN[how](tmp_path / "step-00000002")
    before = [t.clone() for t in (*model.parameters(), *optimizer.state[model.weight].values())]
    with pytest.raises(dt.DeuteronError, match="cannot be read") as raised:
        kept.load()
    assert "an older one: load(1)" in str(raised.value) and "read" not in capsys.readouterr().out
    after = (*model.parameters(), *optimizer.state[model.weight].values())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert kept.load(1) == 1
