"""Trains the digits network and writes its weights: ``python -m inference.zoo.train_digits``.

The same torch on the same kind of machine writes the same tensors again, to the bit (safetensors shuffles the
metadata in front of them, so the files differ). About 20 s on one core. The held-out images serve only for the figure
at the end: no epoch, seed or setting is chosen by them.
"""

from __future__ import annotations

import time
from typing import Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from inference.zoo.digits_data import SPLIT_SEED, LabelledImages, split
from inference.zoo.digits_net import WEIGHTS, DigitsNet

__all__ = ["accuracy", "main", "train"]

SEED: Final = 0
EPOCHS: Final = 60
BATCH_SIZE: Final = 64
MAX_LEARNING_RATE: Final = 3e-3


def shift(images: Tensor, generator: torch.Generator) -> Tensor:
    """Move each image by -1, 0 or 1 pixels along each axis; what comes in is background. FP32 [n, 1, 8, 8] to same."""
    rows, _, height, width = images.shape
    padded = functional.pad(images, (1, 1, 1, 1))
    down, right = torch.randint(0, 3, (2, rows, 1), generator=generator)
    ys = (down + torch.arange(height)).unsqueeze(2)
    xs = (right + torch.arange(width)).unsqueeze(1)
    return padded[torch.arange(rows)[:, None, None], 0, ys, xs].unsqueeze(1)


def train(data: LabelledImages) -> DigitsNet:
    """Train a network from scratch on these images. It is returned in evaluation mode, on the CPU."""
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    images, labels = torch.from_numpy(data.images), torch.from_numpy(data.labels)
    net = DigitsNet().train()
    loss = nn.CrossEntropyLoss(label_smoothing=0.05)
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=1e-2)
    batches = -(-len(images) // BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, MAX_LEARNING_RATE, epochs=EPOCHS, steps_per_epoch=batches)
    for _ in range(EPOCHS):
        for members in torch.split(torch.randperm(len(images), generator=generator), BATCH_SIZE):
            optimizer.zero_grad()
            loss(net(shift(images[members], generator)), labels[members]).backward()
            optimizer.step()
            schedule.step()
    return net.eval()


@torch.inference_mode()
def accuracy(net: DigitsNet, data: LabelledImages) -> float:
    """The fraction of these images that the network reads rightly."""
    read = net(torch.from_numpy(data.images)).argmax(dim=1)
    return float((read == torch.from_numpy(data.labels)).double().mean())


def main() -> None:
    """Train, print the held-out accuracy, write `WEIGHTS`."""
    # The order of floating-point sums depends on the number of threads.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    started = time.perf_counter()
    train_data, held_out_data = split()
    net = train(train_data)
    held_out_accuracy = accuracy(net, held_out_data)
    WEIGHTS.parent.mkdir(exist_ok=True)
    metadata = {
        "accuracy": f"{held_out_accuracy:.6f}",
        "held_out": str(len(held_out_data.labels)),
        "split_seed": str(SPLIT_SEED),
        "torch": torch.__version__,
    }
    save_file(net.state_dict(), WEIGHTS, metadata=metadata)
    # safetensors writes it for the owner only, and a copied tree may be served by another user.
    WEIGHTS.chmod(0o644)
    print(f"train accuracy:    {accuracy(net, train_data):.4f} of {len(train_data.labels)} images")
    print(f"held-out accuracy: {held_out_accuracy:.4f} of {len(held_out_data.labels)} images")
    print(f"wrote {WEIGHTS} ({WEIGHTS.stat().st_size:,} bytes) in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
