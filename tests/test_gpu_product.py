"""Products with what follows them, and attention, by kernels in Triton, on a GPU."""

from __future__ import annotations

import pytest
import torch

import deuteron as dt
from tests import attention_cases, product_cases
from tests.tolerances import allowed, error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "made",
    [
        *(product_cases.cases, product_cases.batched),
        *(product_cases.shared_out, product_cases.several),
        *(attention_cases.cases, attention_cases.gradients, attention_cases.pages),
    ],
)
def test_every_case(made, dtype):
    cases = list(made(dtype))
    found = [product_cases.compare(case, "cuda", most=9) for case in cases]
    assert sum(count for count, _ in found) >= len(cases)
    assert not [wrong for _, each in found for wrong in each]


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_products_of_bytes(kind):
    found = [product_cases.compare(case, "cuda", most=9) for case in product_cases.of_bytes(kind)]
    assert sum(count for count, _ in found) >= 3
    assert not [wrong for _, each in found for wrong in each]


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
