"""Collectives of torch.distributed as torch.compile writes them: one call that starts the
collective, and one that waits for it. Our operators do both, so the wait just passes the result on.
"""

from typing import Any

from deuteron.frontends.aten_site import Entry, Site
from deuteron.ops.collective import REDUCE
from deuteron.ops.emit import Sym


def _group(site: Site, group: Any, ranks: int | None = None) -> dict[str, Any]:
    """Name and size of a process group."""
    from torch.distributed import distributed_c10d

    resolve: Any = vars(distributed_c10d)["_resolve_process_group"]
    site.need(isinstance(group, str), "its process group is not given by name")
    size = ranks or int(resolve(group).size())
    return {"group": str(group), "ranks": size}


def _reduce(site: Site, reduce: Any) -> dict[str, str]:
    site.need(str(reduce).lower() in REDUCE, f"it reduces by {reduce}")
    return {"reduce": str(reduce).lower()}


def _all_reduce(site: Site, x: Sym, reduce: Any, group: Any) -> Any:
    return site.all_reduce(x, **_reduce(site, reduce), **_group(site, group))


def _all_gather(site: Site, x: Sym, ranks: int, group: Any) -> Any:
    return site.all_gather(x, **_group(site, group, ranks))


def _reduce_scatter(site: Site, x: Sym, reduce: Any, ranks: int, group: Any) -> Any:
    return site.reduce_scatter(x, **_reduce(site, reduce), **_group(site, group, ranks))


def _all_to_all(site: Site, x: Sym, takes: Any, gives: Any, group: Any) -> Any:
    known = all(isinstance(n, int) for n in (*takes, *gives))
    site.need(known, "its parts are only known when it runs")
    return site.all_to_all(x, takes=tuple(takes), gives=tuple(gives), **_group(site, group))


def _wait(site: Site, x: Sym) -> Sym:
    return x


TABLE: dict[str, Entry] = {
    "all_reduce.default": _all_reduce,
    "all_gather_into_tensor.default": _all_gather,
    "reduce_scatter_tensor.default": _reduce_scatter,
    "all_to_all_single.default": _all_to_all,
    "wait_tensor.default": _wait,
    "_wrap_tensor_autograd.default": _wait,
}
