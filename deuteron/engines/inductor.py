"""``inductor``: torch.compile on one region. Slow to build, so only measured when time allows."""

import shutil
import types
from collections.abc import Sequence
from typing import Any

from deuteron.engines.base import BuildContext, Candidate, Kernel, as_answer, refuse_if
from deuteron.engines.libraries import separate_seconds
from deuteron.engines.roofline import is_product, region_bound
from deuteron.engines.torch_engine import bound_call, tensors
from deuteron.ir.region import Region
from deuteron.policy import Policy
from deuteron.target import Target, has_triton


class InductorEngine:
    """Compiles a region of two or more nodes with torch's own code generator."""

    name = "inductor"
    version = "1"

    @as_answer
    def refuse(self, region: Region, target: Target, policy: Policy) -> None:
        ops, same = region.ops, "torch.compile calls the same libraries"
        refuse_if(len(ops) < 2, "a single operator has nothing to fuse", quiet=True)
        product = is_product(region.nodes)
        refuse_if(product, "products are left to the libraries", same, quiet=True)
        refuse_if("aten" in ops, "the region holds an opaque call", quiet=True)
        if target.is_cuda:
            refuse_if(not has_triton(), "Triton is not installed", "pip install triton")
        else:
            missing = not any(map(shutil.which, ("g++", "c++", "clang++")))
            refuse_if(missing, "no C++ compiler on this machine", "install g++ or clang++")

    def candidates(self, region: Region, target: Target, policy: Policy) -> Sequence[Candidate]:
        return [Candidate(self.name, self.version, build_s=2.5 if target.is_cuda else 15.0)]

    def estimate(self, region: Region, target: Target, candidate: Candidate) -> float:
        ideal = region_bound(region, target).seconds / 0.8
        return min(ideal + 2 * target.call, separate_seconds(region, target) * 2)

    def build(self, region: Region, candidate: Candidate, ctx: BuildContext) -> Kernel:
        import torch

        graph, nodes = region.graph, region.nodes
        fns = [bound_call(graph, node, ctx.device) for node in nodes]
        calls = [(fn, tensors(graph, n), n.outputs) for fn, n in zip(fns, nodes, strict=True)]

        def run(*xs: Any) -> Any:
            env = dict(zip(region.inputs, xs, strict=True))
            for fn, reads, writes in calls:
                out = fn(*[env[v] for v in reads])
                env.update(zip(writes, out if isinstance(out, tuple) else (out,), strict=True))
            results = tuple(env[v] for v in region.outputs)
            return results[0] if len(results) == 1 else results

        # dynamo limits recompilations per code object, so every region gets its own
        code = run.__code__.replace(co_name=f"region_{region.key}")
        own = types.FunctionType(code, run.__globals__, code.co_name, None, run.__closure__)
        compiled = torch.compile(own, dynamic=False, fullgraph=True)
        return Kernel(compiled, note="torch.compile, dynamic=False")
