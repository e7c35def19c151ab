"""Progress messages, which go to the logger "deuteron" of Python's ``logging``.

Stages are logged at level INFO, each measured region at DEBUG. Nothing is printed unless a program
sets up logging, or ``verbose=True`` is passed to ``optimize`` or ``compile``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("deuteron")


@contextmanager
def logged_to_console(verbose: bool) -> Iterator[None]:
    """Print what is logged at INFO and above while the block runs, if ``verbose``."""
    if not verbose:
        yield
        return
    handler, before = logging.StreamHandler(), (log.level, log.propagate)
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    log.addHandler(handler)
    log.setLevel(min(log.level or logging.INFO, logging.INFO))
    log.propagate = False  # a program that prints all logs would print these twice
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])  # not the attribute alone: logging remembers what is enabled
        log.propagate = before[1]
