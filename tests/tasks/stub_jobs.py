"""Small jobs, as a user would write them in the current folder, that the command's tests name."""

import os
import signal
from collections.abc import Callable, Sequence
from typing import Literal

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

Layout = Literal["whole", "half"]


class Rotary(nn.Module):
    def __init__(self, head_dim: int, *, base: float = 1e4, layout: Layout = "whole"):
        super().__init__()
        self.base = base


class Bias(nn.Module):
    def __init__(self, heads: int, *, distance: str = "euclidean"):
        super().__init__()


class Transformer(nn.Module):
    def __init__(
        self,
        grid: Sequence[int],
        *,
        dim: int = 8,
        rotary: Callable[[int], Rotary] | None = None,
        bias: Callable[[int], Bias] | None = None,
    ):
        super().__init__()
        if dim % 2:
            raise ValueError(f"dim is {dim}; expected an even number")
        self.grid, self.dim = tuple(grid), dim
        self.rotary = rotary and rotary(dim // 2)
        self.bias = bias and bias(2)


class Model(lightning.LightningModule):
    def __init__(
        self,
        classes: dict[str, list[str]],
        image_size: Sequence[int],
        patch_size: Sequence[int],
        transformer: Callable[[Sequence[int]], Transformer] = Transformer,
        *,
        lr: float = 0.5,
        weights: str | None = None,
        fails: str | None = None,
    ):
        super().__init__()
        self.save_hyperparameters()
        grid = [s // p for s, p in zip(image_size, patch_size, strict=True)]
        self.transformer = transformer(grid)
        self.classes = classes
        self.linear = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.linear.weight)
        if weights:
            self.linear.weight.data.fill_(torch.load(weights)["value"])
        self.fails = fails

    def training_step(self, batch, batch_idx):
        if self.fails == "training_step" and batch_idx == 1:
            raise ValueError("raised in training_step")
        if self.fails == "SIGTERM" and self.current_epoch == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.fails == "Ctrl-C" and self.current_epoch == 1:
            raise KeyboardInterrupt
        return self.linear(batch[1]).mean()

    def test_step(self, batch, batch_idx):
        self.log("test/loss", self.linear(batch[1]).mean(), batch_size=len(batch[1]))
        self.log("test/kind_accuracy", batch[1].mean(), batch_size=len(batch[1]))

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", float(self.current_epoch), batch_size=len(batch[1]))

    def predict_step(self, batch, batch_idx):
        files, numbers = batch
        answers = {}
        for question, names in self.classes.items():
            label = (numbers[:, 0] * 8).long() % len(names)
            answers[question] = {"label": label, "probability": numbers[:, 0]}
        return {"file": list(files), **answers}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.hparams["lr"])


class Numbers(Dataset):
    def __init__(self, fails: str | None):
        self.fails = fails

    def __len__(self):
        return 7

    def __getitem__(self, index):
        if self.fails == "reading" and index == 5:
            raise ValueError("5.png cannot be read")
        if self.fails == "type":
            raise TypeError("0.png has another type")
        return f"{index}.png", torch.tensor([index / 8])


class Data(lightning.LightningDataModule):
    def __init__(
        self,
        image_size: int | tuple[int, int] = 32,
        patch_size: int = 4,
        questions: int = 1,
        predict_folder: str | None = None,
        fails: str | None = None,
        num_workers: int = 0,
    ):
        super().__init__()
        self.save_hyperparameters()
        if predict_folder == "missing":
            raise FileNotFoundError("no folder at missing")
        self.image_size = (image_size,) * 2 if isinstance(image_size, int) else image_size
        self.patch_size = (patch_size, patch_size)
        names = ["cat", "dog", "owl"]
        self.classes = {"class": names} if questions == 1 else {"what": names, "where": ["l", "r"]}
        self.fails, self.num_workers = fails, num_workers

    def train_dataloader(self):
        return DataLoader(Numbers(self.fails), batch_size=2, num_workers=self.num_workers)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class Beyond(lightning.LightningDataModule):
    """Images whose labels go beyond the classes, or that answer another question."""

    image_size, patch_size, channels = (8, 8), (4, 4), 1

    def __init__(self, question: str = "class"):
        super().__init__()
        self.classes = {"class": ["cat", "dog"]}
        self.question = question

    def train_dataloader(self):
        items = [(torch.zeros(1, 8, 8), {self.question: label}) for label in (0, 5)]
        return DataLoader(items, batch_size=2)  # type: ignore[arg-type]

    val_dataloader = test_dataloader = train_dataloader


class Text(lightning.LightningDataModule):
    """Data of another kind: no classes, no sizes, no test data."""

    def train_dataloader(self):
        return DataLoader(Numbers(None), batch_size=7)


class Plain(lightning.LightningModule):
    """A model of another kind."""

    def __init__(self, width: int = 3):
        super().__init__()
        self.linear = nn.Linear(1, width)

    def training_step(self, batch, batch_idx):
        return self.linear(batch[1]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Patchy(Plain):
    """A model of another kind that needs one of the linked values and has a default for another."""

    def __init__(self, patch_size: int, channels: int = 3):
        super().__init__()
        self.patch_size, self.channels = patch_size, channels
