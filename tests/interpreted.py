"""Cases that run in Triton's interpreter, which is decided when triton is imported.

So they run in another process. It is started once, when it is first needed, and has imported torch,
triton and this package by the time it is asked; for every question it forks, so that nothing which
one group of cases changes is seen by the next. What a group prints last is what it found.

``python -m tests.interpreted tests.conv_cases`` runs one group here, and shows what it prints.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import select
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent


def found_in_interpreter(module: str, *args: str, seconds: float = 900) -> Any:
    """What ``python -m module args`` prints last, as JSON; its errors if it breaks off."""
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps([module, *args]) + "\n")
    server.stdin.flush()
    ready, _, _ = select.select([server.stdout], [], [], seconds)
    if not ready:
        server.kill()
        _server.cache_clear()
        raise TimeoutError(f"{module} {args} in the interpreter: no answer after {seconds} s")
    code, out, errors = json.loads(server.stdout.readline())
    assert code == 0, errors[-3000:]
    return json.loads(out.splitlines()[-1])


def assert_none_failed(found: Any, at_least: int = 0) -> None:
    """So many cases ran, and what failed is shown."""
    failed = found["failed"]
    lines = [f"{k}\n{v}" for k, v in failed.items()] if isinstance(failed, dict) else failed
    assert not failed, "\n\n".join(lines)
    assert found.get("count", 0) >= at_least


def tell(found: Iterable[tuple[int, Sequence[str]]]) -> None:
    """Prints what a group found: for each of its parts how many cases ran, and what is wrong."""
    each = list(found)
    failed = [text for _, wrong in each for text in wrong]
    print(json.dumps({"count": sum(count for count, _ in each), "failed": failed}))


def tell_claims(claims: Mapping[str, Callable[[], str]]) -> None:
    """The same of claims by their names, each of which tells what is wrong."""
    failed = {}
    for name, claim in claims.items():
        try:
            wrong = claim()
        except Exception:
            wrong = traceback.format_exc(limit=-8)
        if wrong:
            failed[name] = wrong
    print(json.dumps({"count": len(claims), "failed": failed}))


@cache
def _server() -> subprocess.Popen[str]:
    """Ends by itself when the process that asks it has ended."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.interpreted"],
        cwd=REPO,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(REPO)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _make_ready() -> None:
    """Have Triton interpreted in this process, without warnings of what numbers do."""
    import numpy as np
    import pytest  # noqa: F401  # modules of tests import it
    import torch

    from tests.triton_interpreter import install

    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    torch.set_num_threads(1)  # threads do not survive a fork, and there is one of us per core
    install()


def serve() -> None:
    """Answer questions until there are no more."""
    _make_ready()
    gc.freeze()  # what is imported is no garbage, here and in the forks
    gc.set_threshold(20_000, 20, 20)
    answers = os.fdopen(os.dup(1), "w")
    for question in sys.stdin:
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            child = os.fork()
            if child == 0:
                os.dup2(out.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                os._exit(_answered(*json.loads(question)))
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            texts = [(file.seek(0), file.read())[1] for file in (out, errors)]
        answers.write(json.dumps([code, *texts]) + "\n")
        answers.flush()


def _answered(module: str, *args: str) -> int:
    sys.argv = [module, *args]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    if sys.argv[1:]:
        _make_ready()
        sys.exit(_answered(*sys.argv[1:]))
    serve()
