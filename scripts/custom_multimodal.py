"""A multimodal model of one page: text, an image and sound in one sequence, with M-RoPE.

    python scripts/custom_multimodal.py

Everything but positions is plain torch: take it as a start for a model of your own. The toy job
needs all three: on a page of 2 × 2 coloured cells, a word names the row, a tone the column, and the
colour there is asked for.
"""

import torch
from torch import nn

import mmpos
from mmpos.positions import Audio, Image, Text, absent, join, of_parts


class Layer(nn.Module):
    """Attention with turned queries and keys, then a feed-forward part."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor, rotation: mmpos.Rotation) -> torch.Tensor:
        """``[B, L, D]`` → ``[B, L, D]``."""
        split = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = split.permute(2, 0, 3, 1, 4)  # [B, H, L, D / H] each
        q, k = mmpos.rotate(q, rotation), mmpos.rotate(k, rotation.dual)
        x = x + self.out(mmpos.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class PageReader(nn.Module):
    """Answers about a page, a text and a sound by a class token."""

    def __init__(self, answers: int, dim: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.text = nn.Embedding(256, dim)
        self.image = nn.Conv2d(3, dim, 4, stride=4)
        self.audio = nn.Conv1d(1, dim, 16, stride=16)
        self.class_token = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.rope = mmpos.MRoPE(dim // heads, axes=3, base=100)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, answers))

    def forward(self, text: torch.Tensor, image: torch.Tensor, audio: torch.Tensor) -> torch.Tensor:
        """Text ``[B, L]``, image ``[B, 3, H, W]`` and waveform ``[B, 1, T]`` → ``[B, answers]``."""
        words, cells, sound = self.text(text), self.image(image), self.audio(audio)
        parts = [Image(*cells.shape[2:]), Text(words.shape[1]), Audio(sound.shape[2])]
        placed = of_parts(parts, device=text.device).positions  # [L, 3]: time, height, width
        rotation = self.rope(join(absent(1, 3, device=text.device), placed))  # for all layers
        first = self.class_token.expand(len(text), -1, -1)
        x = torch.cat((first, cells.flatten(2).mT, words, sound.mT), dim=1)
        for layer in self.layers:
            x = layer(x, rotation)
        return self.head(x[:, 0])


def pages(count: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Text, image, sound, and the colour that is asked for."""
    colours, row, column = (
        torch.randint(n, s) for n, s in ((3, (count, 2, 2)), (2, (count,)), (2, (count,)))
    )
    image = nn.functional.one_hot(colours, 3).permute(0, 3, 1, 2).float()
    image = image.repeat_interleave(4, 2).repeat_interleave(4, 3)
    text = torch.tensor([list(b"top"), list(b"low")])[row]
    tone = torch.sin(torch.arange(64) * (0.2 + 0.4 * column[:, None]))
    return [text, image, tone[:, None]], colours[torch.arange(count), row, column]


def main(steps: int = 400) -> float:
    torch.manual_seed(0)
    model = PageReader(answers=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        inputs, colour = pages(64)
        loss = nn.functional.cross_entropy(model(*inputs), colour)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.3f}")
    with torch.no_grad():
        inputs, colour = pages(1000)
        right = (model(*inputs).argmax(-1) == colour).float().mean().item()
    print(f"right: {100 * right:.1f} % of 1,000 new pages (chance 33.3)")
    return right


if __name__ == "__main__":
    main()
