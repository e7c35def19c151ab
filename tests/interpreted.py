"""Cases that run in Triton's interpreter, which is decided when triton is imported: in a process
of their own, whose last line is what they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parent.parent


def found_in_interpreter(module: str, *args: str, seconds: float = 900) -> Any:
    """What ``python -m module args`` prints last, as JSON; its errors if it breaks off."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, *args],
        cwd=REPO,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def assert_none_failed(found: Any, at_least: int = 0) -> None:
    """So many cases ran, and what failed is shown."""
    failed = found["failed"]
    lines = [f"{k}\n{v}" for k, v in failed.items()] if isinstance(failed, dict) else failed
    assert not failed, "\n\n".join(lines)
    assert found.get("count", 0) >= at_least
