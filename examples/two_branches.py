"""Search a chip for a model of two branches, images and text; needs the extra ``torch``."""

import sys
from pathlib import Path

import phaze_fast as pf
from phaze_fast import models

try:
    import torch
    from torch import nn
except ImportError:
    sys.exit(0)


def block(width: int) -> "nn.Module":
    """Give one encoder layer."""
    return nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True, norm_first=True)


class ImageAndText(nn.Module):
    """Patches and tokens pass an encoder each, and meet in a projection."""

    def __init__(self, width: int = 512, depth: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.table = nn.Embedding(32000, width)
        self.image = nn.ModuleList([block(width) for _ in range(depth)])
        self.text = nn.ModuleList([block(width) for _ in range(depth)])
        self.join = nn.Linear(2 * width, width)

    def forward(self, pixels: "torch.Tensor", ids: "torch.Tensor") -> "torch.Tensor":
        x, y = self.patches(pixels).flatten(2).transpose(1, 2), self.table(ids)
        for layer in self.image:
            x = layer(x)
        for layer in self.text:
            y = layer(y)
        return self.join(torch.cat([x.mean(1), y.mean(1)], -1))


def two_branches() -> "tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]":
    """Give the module and example inputs, as ``phaze-fast trace`` asks for them."""
    with torch.device("meta"):
        inputs = torch.zeros(2, 3, 224, 224), torch.zeros(2, 64, dtype=torch.long)
        return ImageAndText(), inputs


def main() -> None:
    """Trace it and search a chip for it."""
    model = models.from_torch(*two_branches())
    print(model)
    print("edges that are no chain:", [edge for edge in model.edges if edge[1] != edge[0] + 1])
    found = pf.search(
        model,
        str(Path(__file__).with_name("small_space.yaml")),
        cluster=pf.Cluster(devices=16, fabric="tpuv4-pod"),
        training=pf.Training(global_batch=256, micro_batch=4),
    )
    print(found)


if __name__ == "__main__":
    main()
