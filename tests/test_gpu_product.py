"""Products with what follows them, and attention, by kernels in Triton, on a GPU."""

from __future__ import annotations

import pytest
import torch

import deuteron as dt
from tests import attention_cases, product_cases
from tests.sweeps import ways
from tests.tolerances import allowed, error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize(("dtype", "most"), ways(9))
@pytest.mark.parametrize(
    "made",
    [
        *(product_cases.cases, product_cases.batched),
        *(product_cases.shared_out, product_cases.several),
        *(attention_cases.cases, attention_cases.gradients, attention_cases.pages),
        *(attention_cases.turned, attention_cases.turned_long, attention_cases.windows),
        attention_cases.uneven,
    ],
)
def test_every_case(made, dtype, most, part):
    cases = list(made(dtype))[part::3]
    found = [product_cases.compare(case, "cuda", most) for case in cases]
    assert sum(count for count, _ in found) >= len(cases)
    assert not [wrong for _, each in found for wrong in each]


OF_BYTES = [(m, torch.int8) for m in (product_cases.of_bytes, attention_cases.of_bytes)]


@pytest.mark.parametrize(
    ("made", "kind"), [*OF_BYTES, (product_cases.of_bytes, torch.float8_e4m3fn)]
)
def test_products_of_bytes(made, kind):
    found = [product_cases.compare(case, "cuda", most=9) for case in made(kind)]
    assert sum(count for count, _ in found) >= 3
    assert not [wrong for _, each in found for wrong in each]


def test_float32_in_three_products():
    """As exact as float32 is, but for a few roundings; one product alone is not."""
    for case in product_cases.singles():
        count, wrong = product_cases.compare(case, "cuda", 9, product_cases.THREE)
        assert count and not wrong
        assert product_cases.compare(case, "cuda", 9, dt.Policy(float32="tf32"))[1]


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_products_of_blocks(kind):
    found = [product_cases.compare(case, "cuda", most=9) for case in product_cases.of_blocks(kind)]
    assert sum(count for count, _ in found) >= 5
    assert not [wrong for _, each in found for wrong in each]


def test_a_captured_graph_follows_the_starts():
    """Where packed sequences begin is read on the device: a replay goes by what is there then."""
    q, k, v = (torch.randn(4, 512, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    starts = torch.tensor([0, 100, 300, 500], device="cuda", dtype=torch.int32)

    def call():
        return dt.functional.attention(q, k, v, starts=starts, causal=True)

    call()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = call()
    for new in ([0, 0, 1, 512], [0, 512, 512, 512], [0, 7, 70, 71]):
        starts.copy_(torch.tensor(new, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, call())
        assert not captured[:, new[-1] :].any()


def test_gradients_of_packed_and_listed_blocks_are_the_same_bits_again():
    masks = dt.functional.masks
    table = dt.functional.block_mask(
        masks.longformer(100, 70), None, None, 1000, 1000, device="cuda"
    )
    starts = torch.tensor([0, 3, 3, 700, 1000], device="cuda", dtype=torch.int32)
    given = [torch.randn(1, 4, 1000, 64, device="cuda").bfloat16().requires_grad_() for _ in "qkv"]
    for how in ({"mask": table}, {"starts": starts, "causal": True}):
        runs = [
            torch.autograd.grad(dt.functional.attention(*given, **how).float().sum(), given)
            for _ in range(3)
        ]
        assert all(
            torch.equal(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True)
        )


def test_a_plan_of_a_layer_its_residual_and_its_norm():
    """Whichever way was quickest: the sum with the product, or with the norm."""
    torch.manual_seed(0)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = torch.nn.Linear(256, 768), torch.nn.LayerNorm(768)

        def forward(self, x, r):
            s = self.linear(x) + r
            return self.norm(s), s

    model = Layer().cuda().bfloat16().eval()
    x, r = (torch.randn(2000, n, device="cuda").bfloat16() for n in (256, 768))
    with torch.no_grad():
        fast = dt.optimize(model, (x, r))
        found, plain = fast(x, r), model(x, r)
        exact = model.double()(x.double(), r.double())
    for ours, theirs, want in zip(found, plain, exact, strict=True):
        assert error(ours, want) <= allowed(error(theirs, want), ours.dtype)
