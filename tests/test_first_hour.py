"""A newcomer's first hour: the wheel is installed, and everything else is done by scripts in
processes of their own, in an empty home."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.tolerances import NETWORK

pytestmark = pytest.mark.sweep
pytest.importorskip("transformers")

MODELS = (
    f"""
CLOSE = {NETWORK}
"""
    + """
import torch, transformers
from torch import nn

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32))
        self.head = nn.Linear(32, 4)
    def forward(self, x, *, scale=1.0):
        hidden = self.body(x) * scale
        return {"logits": self.head(hidden), "hidden": hidden}

small = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
words = dict(vocab_size=300, **small)

def make(name):
    torch.manual_seed(0)
    nets = {
        "bert": lambda: transformers.BertModel(transformers.BertConfig(**words)),
        "vit": lambda: transformers.ViTModel(
            transformers.ViTConfig(image_size=32, patch_size=8, **small)),
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**words)),
        "own": Own,
    }
    return nets[name]().eval()

def example(name, n):
    torch.manual_seed(n)
    if name == "vit":
        return torch.randn(n, 3, 32, 32)
    return torch.randn(n, 8) if name == "own" else torch.randint(0, 300, (n, 12))
"""
)

OPTIMISE = """
import torch, deuteron as dt
from models import CLOSE, make, example
torch.set_grad_enabled(False)
for name in ("bert", "vit", "llama", "own"):
    model = make(name)
    fast = dt.optimize(model, (example(name, 1),), budget_s=1.0)
    for n in (1, 2, 5):
        x = example(name, n)
        got, want = fast(x), model(x)
        assert type(got) is type(want), (type(got), type(want))
        torch.testing.assert_close(got[list(want)[0]], want[list(want)[0]], rtol=CLOSE, atol=CLOSE)
    text = str(fast.explain())
    assert len(text.splitlines()) < 40 and "eager" in text, text
    if name == "llama":
        ids, how = example(name, 1), dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
        assert torch.equal(fast.generate(ids, **how), model.generate(ids, **how))
    else:
        fast.save(f"{name}.json")
    print("optimised", name, flush=True)
"""

LOAD = """
import torch, deuteron as dt
from models import CLOSE, make, example
torch.set_grad_enabled(False)
for name in ("bert", "vit", "own"):
    fast, model = dt.load(f"{name}.json"), make(name)
    for n in (1, 2, 5):
        got, want = fast(example(name, n)), model(example(name, n))
        torch.testing.assert_close(got[list(want)[0]], want[list(want)[0]], rtol=CLOSE, atol=CLOSE)
    print("loaded", name, flush=True)
"""

STOP = """
import torch, deuteron as dt
from torch import nn
model = nn.Sequential(*[nn.Sequential(nn.Linear(64 + i, 65 + i), nn.GELU()) for i in range(60)])
print("begun", flush=True)
dt.optimize(model.eval(), torch.randn(16, 64), budget_s=60.0)
print("ended")
"""


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory, repo):
    """Runs a script where nothing is but the installed wheel."""
    home = tmp_path_factory.mktemp("home")
    site, wheels = home / "site", home / "wheels"
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    build = ["wheel", str(repo), "--no-deps", "--no-build-isolation", "-w", str(wheels)]
    subprocess.run([*pip, *build], check=True, cwd=home)
    (wheel,) = wheels.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    (home / "models.py").write_text(MODELS)
    more = os.environ.get("PYTHONPATH", "")
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": f"{site}:{home}:{more}"}

    def start(script: str) -> subprocess.Popen[str]:
        path = home / "script.py"
        path.write_text(textwrap.dedent(script))
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen([sys.executable, str(path)], cwd=home, env=env, **both)

    return start


def test_three_models_of_transformers_and_one_of_ones_own(newcomer):
    begin = time.perf_counter()
    for script, last in ((OPTIMISE, "optimised own"), (LOAD, "loaded own")):
        process = newcomer(script)
        said, _ = process.communicate(timeout=600)
        assert process.returncode == 0 and said.strip().endswith(last), said
    assert time.perf_counter() - begin < 600, "a first hour is not spent waiting"


def test_a_search_can_be_stopped(newcomer):
    process = newcomer(STOP)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    assert process.returncode != 0 and "KeyboardInterrupt" in said and "ended" not in said
    home = Path(process.args[1]).parent  # type: ignore[index]
    assert not [*home.rglob("*.tmp")], "nothing half written"
