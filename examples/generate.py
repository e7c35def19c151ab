"""A Llama of the zoo that goes on writing: keys and values in pages, a step of decoding captured.

    python examples/generate.py                      # a small one, on the CPU or the GPU
    python examples/generate.py --device cuda --layers 16 --hidden 2048 --new 256

The model is cut where it waits for its keys and values: from one attention to the next, everything
is one plan (the output projection, the sum, the norms, the gated layer, queries, keys and values of
the next layer with their positions). In between, new keys and values are written into pages, and
`paged_attention` reads those. All of it takes any number of new positions, so that a prompt and a
step of one token are the same code.

Where a token goes is computed on the device: from its position to its page and its place there. So
a step is one CUDA Graph on a GPU, replayed for every token without a word from Python; on a CPU the
plans run one after the other.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

import deuteron as dt
from deuteron.plan.cuda_graph import capture
from deuteron.zoo.llama import LlamaConfig, LlamaForCausalLM, apply_rotary


class Asked(nn.Module):
    """Queries, keys and values of a layer."""

    def __init__(self, model: LlamaForCausalLM, layer: int) -> None:
        super().__init__()
        block = model.model.layers[layer]
        self.norm, self.attention = block.input_layernorm, block.self_attn

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, h = self.attention, self.norm(x)
        q, k, v = (a._heads(linear(h)) for linear in (a.q_proj, a.k_proj, a.v_proj))
        return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v


class Begin(nn.Module):
    """From tokens to the first attention."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.embed, self.rotary = model.model.embed_tokens, model.model.rotary_emb
        self.asked = Asked(model, 0)

    def forward(self, tokens: Tensor, places: Tensor) -> tuple[Tensor, ...]:
        x = self.embed(tokens)
        angles = places.float()[:, None, :, None] * self.rotary.inv_freq
        angles = torch.cat([angles, angles], -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return x, cos, sin, *self.asked(x, cos, sin)


class Between(nn.Module):
    """From one attention to the next, or to the logits of the last position."""

    def __init__(self, model: LlamaForCausalLM, layer: int) -> None:
        super().__init__()
        block = model.model.layers[layer]
        self.out, self.norm, self.mlp = (
            block.self_attn.o_proj,
            block.post_attention_layernorm,
            block.mlp,
        )
        last = layer + 1 == len(model.model.layers)
        self.asked = None if last else Asked(model, layer + 1)
        self.last, self.head = (model.model.norm, model.lm_head) if last else (None, None)

    def forward(self, x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        x = x + self.out(y.transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norm(x))
        if self.asked is not None:
            return x, *self.asked(x, cos, sin)
        assert self.head is not None and self.last is not None
        return (self.head(self.last(x[:, -1])),)


class Writer:
    """Goes on with prompts, always by the likeliest token.

    model      a Llama of the zoo
    batch      how many prompts at a time, all of one length
    length     the most positions of a sequence, prompt and all
    positions  of a page
    find       whether plans are searched for, as in ``dt.optimize``

    >>> write = Writer(zoo.build("llama"), batch=2, length=256)
    >>> tokens = write(prompts, 100)      # [2, 100] after prompts [2, n]
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        batch: int,
        length: int,
        positions: int = 64,
        find: bool | None = None,
    ) -> None:
        c, weight = model.config, model.lm_head.weight
        self.positions, self.length = positions, length
        each = -(-length // positions)
        shape = (batch * each, positions, c.num_key_value_heads, c.head_dim)
        self.pages = [
            tuple(torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in "kv")
            for _ in range(c.num_hidden_layers)
        ]
        numbers = {"dtype": torch.int32, "device": weight.device}
        self.table = torch.arange(batch * each, **numbers).view(batch, each)
        self.token = torch.zeros(batch, 1, dtype=torch.int64, device=weight.device)
        self.lengths = torch.zeros(batch, **numbers)
        policy = dt.Policy(cuda_graph=False)  # the whole step is one
        how = {"policy": policy} | ({} if find is None else {"find": find})
        with torch.no_grad():
            self.begin = dt.optimize(Begin(model).eval(), (self.token, self.token), **how)
            x, cos, sin, q, _, _ = self.begin(self.token, self.token)
            self.between = [
                dt.optimize(Between(model, i).eval(), (x, q, cos, sin), **how)
                for i in range(c.num_hidden_layers)
            ]
        self.graph: torch.cuda.CUDAGraph | None = None

    def logits(self, tokens: Tensor) -> Tensor:
        """Of the last of new tokens [batch, any], which are written into the pages."""
        new = torch.arange(tokens.shape[1], device=tokens.device)
        places = self.lengths.long()[:, None] + new
        page = self.table.long().gather(1, places // self.positions)
        slots = (page * self.positions + places % self.positions).flatten()
        lengths = self.lengths + tokens.shape[1]
        x, cos, sin, q, k, v = self.begin(tokens, places)
        for pages, between in zip(self.pages, self.between, strict=True):
            for room, rows in zip(pages, (k, v), strict=True):
                rows = rows.transpose(1, 2).flatten(0, 1)
                room.flatten(0, 1).index_copy_(0, slots, rows)
            y = dt.functional.paged_attention(q, *pages, self.table, lengths)
            x, *rest = between(x, y, cos, sin)
            q, k, v = rest or (x, x, x)
        self.lengths += tokens.shape[1]
        return x

    def step(self) -> None:
        """One token more for every sequence."""
        self.token.copy_(self.logits(self.token).argmax(-1, keepdim=True))

    @torch.no_grad()
    def __call__(self, prompt: Tensor, new: int) -> Tensor:
        if prompt.shape[1] + new > self.length:
            wanted = f"{prompt.shape[1]} + {new} positions"
            raise ValueError(f"{wanted} do not fit into {self.length}: give a larger length")
        if self.token.is_cuda and self.graph is None:
            self.lengths.zero_()
            self.graph, _ = capture(self.step)
        self.lengths.zero_()
        self.token.copy_(self.logits(prompt).argmax(-1, keepdim=True))
        found = [self.token.clone()]
        for _ in range(new - 1):
            if self.graph is None:
                self.step()
            else:
                self.graph.replay()
            found.append(self.token.clone())
        return torch.cat(found, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description="A Llama of the zoo that goes on writing.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--new", type=int, default=16)
    given, _ = parser.parse_known_args()
    torch.manual_seed(0)
    sizes = {"hidden_size": given.hidden, "intermediate_size": 4 * given.hidden}
    config = LlamaConfig(num_hidden_layers=given.layers, **sizes)
    dtype = torch.bfloat16 if given.device == "cuda" else torch.float32
    model = LlamaForCausalLM(config).to(given.device, dtype).eval()
    prompt = torch.randint(0, config.vocab_size, (1, 8), device=given.device)
    write = Writer(model, 1, 8 + given.new, find=given.device == "cuda")
    write(prompt, min(2, given.new))
    begin = time.perf_counter()
    tokens = write(prompt, given.new).tolist()[0]
    seconds = time.perf_counter() - begin
    with torch.no_grad():
        likely = [int(model(prompt)[0, -1].argmax())]
    print(f"first token as without a cache: {tokens[:1] == likely}")
    print(f"{given.new} tokens, {1e3 * seconds / given.new:.2f} ms each")


if __name__ == "__main__":
    main()
