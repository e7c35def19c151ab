"""Element types that only torch computes with: complex numbers and wide unsigned integers go from
one opaque call to the next, and no operator of ours takes them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import deuteron as dt
from deuteron.errors import FileError, GraphError
from deuteron.ir import Constant, TensorType, parse_graph
from deuteron.ops import infer
from tests.tolerances import NETWORK

COMPLEX = [torch.complex64, torch.complex128]


class Spectral(nn.Module):
    """A layer of a Fourier neural operator: some frequencies are mixed, the others dropped."""

    def __init__(self, channels: int, modes: int) -> None:
        super().__init__()
        self.modes, self.beside = modes, nn.Conv2d(channels, channels, 1)
        self.weight = nn.Parameter(torch.randn(channels, channels, modes, modes) + 0j)

    def forward(self, x):
        n, found = self.modes, torch.fft.rfft2(x)
        kept = torch.zeros_like(found)
        kept[..., :n, :n] = torch.einsum("bixy,ioxy->boxy", found[..., :n, :n], self.weight)
        return F.gelu(torch.fft.irfft2(kept, s=x.shape[-2:]) + self.beside(x))


@pytest.mark.parametrize("find", [False, True])
def test_a_network_of_fourier_transforms_runs_and_is_saved(find, tmp_path):
    net = nn.Sequential(nn.Conv2d(1, 4, 1), Spectral(4, 3), Spectral(4, 3), nn.Conv2d(4, 1, 1))
    fast = dt.optimize(net.eval(), torch.randn(2, 1, 8, 8), find=find, budget_s=0.5)
    x = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        want = net(x)
    torch.testing.assert_close(fast(x), want, rtol=NETWORK, atol=NETWORK)
    assert any("fft" in name for name in fast.opaque)
    again = dt.load_plan(fast.plan.save(tmp_path / "fourier.plan.json"))
    (name,) = again.graph.inputs
    (got,) = again.run(**{name: x}).values()
    torch.testing.assert_close(got, want, rtol=NETWORK, atol=NETWORK)


@pytest.mark.parametrize("dtype", COMPLEX)
@pytest.mark.parametrize("size", [2, 20])
def test_complex_constants_are_written_and_read(dtype, size):
    data = torch.randn(size, dtype=dtype).conj()  # a conjugate that memory does not hold yet
    g = dt.Graph("complex")
    w = g.constant(data, "w")
    how = {"target": "aten.abs.default", "args": (("in", 0),)}
    short = "f32" if dtype == torch.complex64 else "f64"
    g.aten(w, out=(f"{short}[{size}]",), **how).output("y")
    graph = g.ir()
    pairs = {"w": torch.view_as_real(data.resolve_conj())}
    assert parse_graph(str(graph), pairs) == graph
    assert torch.equal(Constant(data).data.imag, data.imag)
    if size > 8:
        with pytest.raises(FileError, match="pairs"):
            parse_graph(str(graph), {"w": torch.zeros(3)})


@pytest.mark.parametrize("dtype", ["c64", "c128", "u16", "u32", "u64"])
def test_no_operator_of_ours_takes_them(dtype):
    odd = TensorType.of((2, 3), dtype)
    for op, types, attrs in (
        ("add", [odd, odd], {}),
        ("reshape", [odd], {"shape": (6,)}),
        ("cast", [TensorType.of((2, 3), "f32")], {"dtype": dtype}),
    ):
        with pytest.raises(GraphError, match="does not compute with") as caught:
            infer(op, types, attrs)
        assert caught.value.remedy


def test_signs_that_memory_does_not_hold_count():
    """A conjugate is a view; so is its imaginary part, whose sign torch keeps beside it."""

    class Parts(nn.Module):
        def forward(self, x):
            return torch.view_as_real(x * 2).relu(), x.imag + 1

    fast = dt.optimize(Parts().eval(), torch.randn(3, 4, dtype=torch.complex64).conj(), find=False)
    x = torch.randn(3, 4, dtype=torch.complex64)
    for given in (x, x.conj(), x.t().conj().t()):
        for got, want in zip(fast(given), Parts()(given.resolve_conj()), strict=True):
            assert torch.equal(got, want)
    relu, turned = nn.ReLU().eval(), x.conj().imag
    assert turned.is_neg()
    assert torch.equal(dt.optimize(relu, turned, find=False)(turned), relu(turned))
    with pytest.raises(dt.BindError, match="signs are still to be turned") as caught:
        fast.plan.run(x=x.conj())
    assert "resolve_conj" in caught.value.remedy
