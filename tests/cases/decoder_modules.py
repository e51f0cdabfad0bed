"""A small decoder written by hand, as GPT or as Llama is."""

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

WIDTH, VOCABULARY = 64, 512


class RmsNorm(nn.Module):
    """As models of transformers write it, in fp32."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


class Block(nn.Module):
    """A block like GPT's or Llama's, with something extra between its halves."""

    def __init__(self, gated, extra):
        super().__init__()
        self.extra = nn.Identity() if extra is None else extra
        norm = RmsNorm if gated else nn.LayerNorm
        self.gated, self.before, self.after = gated, norm(WIDTH), norm(WIDTH)
        linears = [nn.Linear(WIDTH, WIDTH, bias=not gated) for _ in range(4)]
        self.q, self.k, self.v, self.o = linears
        self.gate = nn.Linear(WIDTH, 4 * WIDTH, bias=False) if gated else None
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=not gated)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=not gated)

    def forward(self, x):
        rows = self.before(x)
        heads = [p(rows).unflatten(-1, (4, -1)).transpose(1, 2) for p in (self.q, self.k, self.v)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        x = self.extra(x)
        rows = self.after(x)
        inner = F.silu(self.gate(rows)) * self.up(rows) if self.gated else F.gelu(self.up(rows))
        return x + self.down(inner)


class Decoder(nn.Module):
    """Tokens to their loss; what is extra in it must not be taken for the usual thing."""

    def __init__(self, gated=False, extra=None):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(gated, extra) for _ in range(3))
        self.norm = RmsNorm(WIDTH) if gated else nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())
