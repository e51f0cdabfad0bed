"""Plan and predict a PyTorch module of one's own; needs the extra ``torch``.

``phaze-fast trace examples/own_module.py:language -o model.json`` writes it as a file, which every
command takes as MODEL.
"""

import sys

import phaze_fast as pf
from phaze_fast import models
from phaze_fast.planning import PlanSpec, predict

try:
    import torch
    from torch import nn
except ImportError:
    sys.exit(0)


class Block(nn.Module):
    """Attention and a gated feed-forward, written by hand."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleDict({"a": nn.LayerNorm(width), "f": nn.LayerNorm(width)})
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: "torch.Tensor") -> "torch.Tensor":
        batch, seq, width = x.shape
        parts = self.qkv(self.norms["a"](x)).view(batch, seq, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, seq, width))
        y = self.norms["f"](x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Language(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, width: int = 2048, heads: int = 16, depth: int = 24) -> None:
        super().__init__()
        self.table = nn.Embedding(32000, width)
        self.layers = nn.ModuleList([Block(width, heads) for _ in range(depth)])
        self.head = nn.Linear(width, 32000, bias=False)

    def forward(self, ids: "torch.Tensor") -> "torch.Tensor":
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def language() -> "tuple[nn.Module, tuple[torch.Tensor]]":
    """Give the module and example inputs, as ``phaze-fast trace own_module.py:language`` asks."""
    with torch.device("meta"):  # no weight is allocated
        return Language(), (torch.zeros(2, 2048, dtype=torch.long),)


def main() -> None:
    """Trace, plan and predict it."""
    model = models.from_torch(*language())
    print(model)
    cluster = pf.Cluster(devices=64, chip="h100", fabric="dgx-h100")
    best = pf.plan(model, cluster, pf.Training(global_batch=512, micro_batch=(1, 2)), top=1).best
    print("best plan:", best)
    given = PlanSpec(global_batch=512, tp=2, dp=32, micro_batch=2, zero=1)
    print("tp 2, dp 32:", predict(model, cluster, given))


if __name__ == "__main__":
    main()
