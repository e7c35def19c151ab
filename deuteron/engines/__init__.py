"""The engines, which run regions: an explicit list. Users add their own with
:func:`register_engine` or an entry point of the group ``deuteron.engines``, and these compete on
equal terms."""

from __future__ import annotations

import importlib.metadata
import warnings
from dataclasses import replace
from functools import lru_cache

from deuteron.engines.base import BuildContext, Candidate, Engine, Forms, Kernel, Refusal
from deuteron.engines.cpu.generated import CpuGen
from deuteron.engines.cpu.kernels import CpuKernels
from deuteron.engines.inductor import InductorEngine
from deuteron.engines.torch_engine import TorchEngine
from deuteron.engines.triton.generated import TritonGen
from deuteron.engines.triton.kernels import TritonKernels
from deuteron.engines.vendor.fused import VendorFused
from deuteron.errors import EngineError
from deuteron.ir.region import Region

_OURS = (TorchEngine, VendorFused, TritonGen, TritonKernels, CpuGen, CpuKernels, InductorEngine)
BUILT_IN: tuple[Engine, ...] = tuple(made() for made in _OURS)
_added: list[Engine] = []


def register_engine(engine: Engine) -> Engine:
    """Let an engine compete in every plan made from now on.

    It needs ``name``, ``version``, ``refuse``, ``candidates``, ``estimate`` and ``build``
    (see ``help(deuteron.Engine)``). An engine of the same name is replaced, except ours.
    """
    _check(engine)
    _added[:] = [e for e in _added if e.name != engine.name] + [engine]
    return engine


def _check(engine: Engine) -> None:
    parts = ("name", "version", "refuse", "candidates", "estimate", "build")
    missing = [part for part in parts if not hasattr(engine, part)]
    if missing:
        wrong, see = f"{engine!r} lacks {', '.join(missing)}", "see docs/adding-an-engine.md"
        raise EngineError(wrong, asked="register_engine(…)", remedy=see)
    if any(engine.name == ours.name for ours in BUILT_IN):
        taken = f"the engine name {engine.name!r} is taken"
        raise EngineError(taken, remedy="give your engine its own name")


def build(region: Region, candidate: Candidate, ctx: BuildContext) -> Kernel:
    """Build a candidate's kernel. The engine sees the region under canonical value names
    (``region.plain``), so whatever it caches for one region serves all equal ones."""
    names = dict(zip(region.inputs, region.plain.inputs, strict=True))
    constants = {names[value]: tensor for value, tensor in ctx.constants.items()}
    by = engine(candidate.engine)
    return by.build(region.plain, candidate, replace(ctx, constants=constants))


def unregister_engine(name: str) -> None:
    """Take an engine added with :func:`register_engine` out again."""
    if all(e.name != name for e in _added):
        added = ", ".join(e.name for e in _added) or "none"
        wrong, asked = f"no engine {name!r} was registered", f"unregister_engine({name!r})"
        raise EngineError(wrong, asked=asked, remedy=f"those that were: {added}")
    _added[:] = [e for e in _added if e.name != name]


@lru_cache
def _from_entry_points() -> tuple[Engine, ...]:
    """Engines of installed packages. One that fails to load gives a warning and is left out."""
    found: list[Engine] = []
    for entry in importlib.metadata.entry_points(group="deuteron.engines"):
        try:
            loaded = entry.load()
            engine = loaded() if isinstance(loaded, type) else loaded
            _check(engine)
            found.append(engine)
        except Exception as error:
            warnings.warn(f"the engine {entry.name!r} could not be loaded: {error}", stacklevel=2)
    return tuple(found)


def engines() -> tuple[Engine, ...]:
    """All engines that compete, ours first. One registered by hand replaces an installed one."""
    named = {e.name for e in _added}
    return (*BUILT_IN, *(e for e in _from_entry_points() if e.name not in named), *_added)


def engine(name: str) -> Engine:
    """The engine called ``name``."""
    for e in engines():
        if e.name == name:
            return e
    remedy = f"known: {', '.join(e.name for e in engines())}; register_engine() adds more"
    raise EngineError(f"there is no engine {name!r}", remedy=remedy)


__all__ = ["BuildContext", "Candidate", "Engine", "Forms", "Kernel", "Refusal"]
__all__ += ["engine", "engines", "register_engine", "unregister_engine"]
