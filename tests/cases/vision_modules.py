"""Small vision and diffusion models, written as people write them."""

from copy import deepcopy

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812


class Bottleneck(nn.Module):
    """A block of ResNet-50."""

    def __init__(self, wide, narrow, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(wide, narrow, 1, bias=False),
            nn.BatchNorm2d(narrow),
            nn.ReLU(),
            nn.Conv2d(narrow, narrow, 3, stride, 1, bias=False),
            nn.BatchNorm2d(narrow),
            nn.ReLU(),
            nn.Conv2d(narrow, 4 * narrow, 1, bias=False),
            nn.BatchNorm2d(4 * narrow),
        )
        same = stride == 1 and wide == 4 * narrow
        shorter = nn.Sequential(
            nn.Conv2d(wide, 4 * narrow, 1, stride, bias=False), nn.BatchNorm2d(4 * narrow)
        )
        self.shorter = nn.Identity() if same else shorter

    def forward(self, x):
        return torch.relu(self.body(x) + self.shorter(x))


class ResNet(nn.Module):
    """ResNet-50 with `narrow` channels instead of 64."""

    def __init__(self, narrow=16, depths=(2, 2)):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, narrow, 7, 2, 3, bias=False), nn.BatchNorm2d(narrow), nn.ReLU()
        )
        self.pool = nn.MaxPool2d(3, 2, 1)
        stages, wide = [], narrow
        for at, depth in enumerate(depths):
            width = narrow * 2**at
            blocks = []
            for number in range(depth):
                blocks.append(Bottleneck(wide, width, 2 if at and not number else 1))
                wide = 4 * width
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(wide, 10)

    def forward(self, x, y):
        x = F.adaptive_avg_pool2d(self.stages(self.pool(self.stem(x))), 1)
        return F.cross_entropy(self.head(x.flatten(1)).float(), y)


class Next(nn.Module):
    """A block of ConvNeXt, with layer scale and stochastic depth."""

    def __init__(self, width):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width, 1, 1), 1e-6))

    def forward(self, x):
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2) * self.scale
        kept = torch.empty((x.shape[0], 1, 1, 1), dtype=x.dtype, device=x.device).bernoulli_(0.9)
        return x + y * kept.div_(0.9)


class ConvNeXt(nn.Module):
    """Two stages of ConvNeXt; its pooling gives the strides of channels-last arrays."""

    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.stages = nn.Sequential(
            nn.Sequential(Next(width), Next(width)),
            nn.Sequential(nn.Conv2d(width, 2 * width, 2, 2), Next(2 * width)),
        )
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x, y):
        x = F.adaptive_avg_pool2d(self.stages(self.stem(x)), 1)
        return F.cross_entropy(self.head(x.flatten(1)).float(), y)


class Window(nn.Module):
    """A block of Swin: attention in windows that shift, with a relative bias."""

    def __init__(self, width, heads, side, shift):
        super().__init__()
        self.heads, self.side, self.shift = heads, side, shift
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros((2 * side - 1) ** 2, heads))
        self.register_buffer("place", torch.zeros(side**4, dtype=torch.long))
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def attend(self, x):
        b, h, w, c = x.shape
        s, heads = self.side, self.heads
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        x = x.view(b, h // s, s, w // s, s, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, s * s, c)
        q, k, v = self.qkv(x).view(-1, s * s, 3, heads, c // heads).permute(2, 0, 3, 1, 4)
        bias = self.bias[self.place].view(s * s, s * s, heads).permute(2, 0, 1)
        scores = q * (c // heads) ** -0.5 @ k.transpose(-2, -1) + bias
        x = (scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, s * s, c)
        x = self.out(x).view(b, h // s, w // s, s, s, c).permute(0, 1, 3, 2, 4, 5)
        x = x.reshape(b, h, w, c)
        return torch.roll(x, (self.shift, self.shift), (1, 2)) if self.shift else x

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Merge(nn.Module):
    """Joins four pixels of Swin into one."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x):
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        parts = (x[:, i::2, j::2] for j in (0, 1) for i in (0, 1))
        return self.out(self.norm(torch.cat(list(parts), -1)))


class Swin(nn.Module):
    """Two stages of Swin."""

    def __init__(self, width=16, heads=2, side=4):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.stages = nn.Sequential(
            nn.Sequential(*(Window(width, heads, side, shift) for shift in (0, 2))),
            Merge(width),
            nn.Sequential(*(Window(2 * width, heads, side, shift) for shift in (0, 2))),
        )
        self.norm, self.head = nn.LayerNorm(2 * width), nn.Linear(2 * width, 10)

    def forward(self, x, y):
        x = self.norm(self.stages(self.stem(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return F.cross_entropy(self.head(x).float(), y)


class ViT(nn.Module):
    """A vision transformer of PyTorch's own multi-head attention, as torchvision's."""

    def __init__(self, width=32, depth=3, patch=8, tokens=17):
        super().__init__()
        self.stem = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.place = nn.Parameter(torch.zeros(1, tokens, width))
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.Sequential()
        for number in range(depth):
            self.layers.add_module(f"encoder_layer_{number}", deepcopy(block))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x, y):
        x = self.stem(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.place
        return F.cross_entropy(self.head(self.norm(self.layers(x))[:, 0]).float(), y)


class Modulated(nn.Module):
    """A block of DiT: norms are scaled and shifted by the condition."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x, c):
        parts = [part.unsqueeze(1) for part in self.modulation(c).chunk(6, 1)]
        y = self.norm1(x) * (1 + parts[1]) + parts[0]
        b, s, width = y.shape
        heads = self.qkv(y).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*heads.unbind(0)).transpose(1, 2).reshape(b, s, width)
        x = x + parts[2] * self.out(y)
        y = self.norm2(x) * (1 + parts[4]) + parts[3]
        return x + parts[5] * self.down(F.gelu(self.up(y), approximate="tanh"))


class DiT(nn.Module):
    """A diffusion transformer on latent images of four channels."""

    def __init__(self, width=32, heads=4, depth=3, patch=2, side=8):
        super().__init__()
        self.stem = nn.Conv2d(4, width, patch, patch)
        self.place = nn.Parameter(torch.zeros(1, (side // patch) ** 2, width))
        self.time, self.label = nn.Linear(16, width), nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Modulated(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, 8 * patch * patch)

    def forward(self, x, t, y):
        x = self.stem(x).flatten(2).transpose(1, 2) + self.place
        c = F.silu(self.time(t)) + self.label(y)
        for block in self.blocks:
            x = block(x, c)
        return (self.head(x).float() ** 2).mean()


class Residual(nn.Module):
    """A residual block of a diffusion U-Net with cross-attention to a context."""

    def __init__(self, before, width, time, context):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, before), nn.Conv2d(before, width, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(time, width)
        self.skip = nn.Conv2d(before, width, 1) if before != width else nn.Identity()
        self.norm3 = nn.LayerNorm(width)
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.kv = nn.Linear(context, 2 * width, bias=False)

    def forward(self, x, t, context):
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        x = self.skip(x) + self.conv2(F.silu(self.norm2(y)))
        b, width, h, w = x.shape
        q = self.q(self.norm3(x.flatten(2).transpose(1, 2)))
        k, v = self.kv(context).chunk(2, -1)
        q, k, v = (z.view(b, -1, 2, width // 2).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, h * w, width)
        return x + self.out(y).transpose(1, 2).reshape(b, width, h, w)


class UNet(nn.Module):
    """A diffusion U-Net of two resolutions."""

    def __init__(self, width=16, time=16, context=24):
        super().__init__()
        wide = 2 * width
        self.stem = nn.Conv2d(4, width, 3, padding=1)
        self.down = nn.ModuleList(
            [Residual(width, width, time, context), Residual(width, wide, time, context)]
        )
        self.shrink, self.grow = nn.Conv2d(width, width, 3, 2, 1), nn.Conv2d(wide, wide, 3, 1, 1)
        self.up = nn.ModuleList([Residual(wide + width, width, time, context)])
        self.norm, self.head = nn.GroupNorm(4, width), nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x, t, context):
        fine = self.down[0](self.stem(x), t, context)
        x = self.down[1](self.shrink(fine), t, context)
        x = self.grow(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        x = self.up[0](torch.cat([x, fine], 1), t, context)
        return (self.head(F.silu(self.norm(x))).float() ** 2).mean()


def module_and_inputs(name):
    """One of the six models by name, and inputs of two samples."""
    image, labels = torch.zeros(2, 3, 32, 32), torch.zeros(2, dtype=torch.long)
    latent, time = torch.zeros(2, 4, 8, 8), torch.zeros(2, 16)
    return {
        "resnet": lambda: (ResNet(), (image, labels)),
        "convnext": lambda: (ConvNeXt(), (image, labels)),
        "swin": lambda: (Swin(), (image, labels)),
        "vit": lambda: (ViT(), (image, labels)),
        "dit": lambda: (DiT(), (latent, time, labels)),
        "unet": lambda: (UNet(), (latent, time, torch.zeros(2, 5, 24))),
    }[name]()
