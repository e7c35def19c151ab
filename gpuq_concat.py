"""Scratch: wall ms of a network with concatenations in place and not, and whether it is right."""
import json, os, statistics, sys, time
import torch
import deuteron as dt
from deuteron.plan import in_place

name, budget = sys.argv[1], float(sys.argv[2])
out = os.environ.get("OUT", "/tmp") + "/concat"
os.makedirs(out, exist_ok=True)
cuda = torch.cuda.is_available()
torch.manual_seed(0)
if name == "densenet":
    import torchvision
    m = torchvision.models.densenet121(weights=None)
else:
    import timm
    m = timm.create_model(name)
for mod in m.modules():
    if isinstance(mod, torch.nn.BatchNorm2d):
        mod.running_mean.normal_(0, 0.1)
        mod.running_var.uniform_(0.5, 1.5)
m = m.eval()
x = torch.randn(32 if cuda else 1, 3, 224, 224)
if cuda:
    m, x = m.cuda().half(), x.cuda().half()
with torch.no_grad():
    eager = m(x).float()
made = {}
for on in (True, False):
    in_place.enabled = on
    t = time.time()
    made[on] = dt.optimize(m, (x,), budget_s=budget)
    with torch.no_grad():
        y = made[on](x).float()
    r = made[on].explain().report
    free = sum("concat_in_place" in g.ops for g in r.regions)
    left = sum("concat" in g.ops for g in r.regions)
    best = sum(g.best_s for g in r.regions) * 1e3
    fired = next((p.fired for p in r.passes if p.name == in_place.NAME), {})
    print(f"{name} {'on ' if on else 'off'}: ready {time.time() - t:.1f} s, error {(y - eager).abs().max():.3g} of {eager.abs().max():.3g}, {len(r.regions)} regions, {free} in place, {left} concats left, sum {best:.3f} ms, {fired}", flush=True)
    with open(f"{out}/{name}-{on}.txt", "w") as f:
        f.write(str(made[on].explain(full=True)))
with torch.no_grad():
    ts = {True: [], False: []}
    for _ in range(30 if cuda else 2):
        for on in made:
            if cuda: torch.cuda.synchronize()
            t = time.perf_counter()
            for _ in range(5 if cuda else 1): made[on](x)
            if cuda: torch.cuda.synchronize()
            ts[on].append((time.perf_counter() - t) / (5 if cuda else 1))
for on in ts:
    print(f"{name} {'on ' if on else 'off'}: wall min {1e3 * min(ts[on]):.3f} median {1e3 * statistics.median(ts[on]):.3f} ms")
