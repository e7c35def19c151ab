"""The zoo's Llama goes on writing with pages of keys and values, as it does without any."""

from __future__ import annotations

import pytest
import torch

from deuteron.zoo.llama import LlamaConfig, LlamaForCausalLM
from examples.generate import Writer

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97}


def plainly(model: LlamaForCausalLM, tokens: torch.Tensor, new: int) -> torch.Tensor:
    """The whole sequence again for every token."""
    start = tokens.shape[1]
    with torch.no_grad():
        for _ in range(new):
            tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
    return tokens[:, start:]


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], ids=lambda d: d
)
def test_as_without_a_cache(device):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval().to(device)
    prompts = [torch.randint(0, 97, (2, n), device=device) for n in (7, 7)]
    write = Writer(model, 2, 20, positions=4, find=False)
    for prompt in prompts:  # the second finds what the first left in the pages
        assert torch.equal(write(prompt, 10), plainly(model, prompt, 10))
    assert (write.graph is not None) == (device == "cuda")
    with pytest.raises(ValueError, match=r"7 \+ 14 positions do not fit into 20"):
        write(prompts[0], 14)
