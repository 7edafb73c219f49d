"""Trains the digits networks and writes their weights: ``python -m examples.training.train_digits``.

Trunk and head are trained together, then the parity head and the decoder on the frozen trunk. It takes about a minute
on a single core. The same torch on the same kind of machine writes the same tensors again, to the bit; the files differ
in the order of safetensors' metadata. The held-out images only serve for the figures at the end: they choose no epoch,
seed or setting.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from examples.training.digits_data import SPLIT_SEED, Floats, LabelledImages, anomalies, auc, split
from headwater.zoo.digits import FEATURES, MAX_PIXEL, WEIGHTS, DecoderNet, DigitsNet, TrunkNet

__all__ = ["main"]

SEED: Final = 0
EPOCHS: Final = 60
DECODER_EPOCHS: Final = 200
BATCH_SIZE: Final = 64
MAX_LEARNING_RATE: Final = 3e-3


def shift(images: Tensor, generator: torch.Generator) -> Tensor:
    """Move each image, FP32 [n, 1, 8, 8], by -1, 0 or 1 pixels along each axis, and fill up with paper."""
    rows, _, height, width = images.shape
    padded = functional.pad(images, (1, 1, 1, 1))
    down, right = torch.randint(0, 3, (2, rows, 1), generator=generator)
    ys = (down + torch.arange(height)).unsqueeze(2)
    xs = (right + torch.arange(width)).unsqueeze(1)
    return padded[torch.arange(rows)[:, None, None], 0, ys, xs].unsqueeze(1)


def fit(net: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor], data: LabelledImages, epochs: int) -> None:
    """Minimise the loss of a network on shifted images and their labels. Leaves it in evaluation mode."""
    generator = torch.Generator().manual_seed(SEED)
    images, labels = torch.from_numpy(data.images), torch.from_numpy(data.labels)
    net.train()
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=1e-2)
    batches = -(-len(images) // BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, MAX_LEARNING_RATE, epochs=epochs, steps_per_epoch=batches)
    for _ in range(epochs):
        for members in torch.split(torch.randperm(len(images), generator=generator), BATCH_SIZE):
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(shift(images[members], generator), labels[members]))
            optimizer.step()
            schedule.step()
    net.eval()


def train(data: LabelledImages) -> DigitsNet:
    """Train trunk and head from scratch on these images."""
    torch.manual_seed(SEED)
    net = DigitsNet()
    loss = nn.CrossEntropyLoss(label_smoothing=0.05)
    fit(net, lambda images, labels: loss(net(images), labels), data, EPOCHS)
    return net


def train_parity(trunk: TrunkNet, data: LabelledImages) -> nn.Linear:
    """Train the parity head from scratch on a frozen trunk."""
    torch.manual_seed(SEED)
    net = nn.Linear(FEATURES, 1)
    loss = nn.BCEWithLogitsLoss()
    fit(net, lambda images, labels: loss(net(features(trunk, images))[:, 0], (labels % 2).float()), data, EPOCHS)
    return net


def train_decoder(trunk: TrunkNet, data: LabelledImages) -> DecoderNet:
    """Train the decoder from scratch on a frozen trunk."""
    torch.manual_seed(SEED)
    net = DecoderNet()

    def loss_of(images: Tensor, labels: Tensor) -> Tensor:
        return functional.mse_loss(net(features(trunk, images)) / MAX_PIXEL, images / MAX_PIXEL)

    fit(net, loss_of, data, DECODER_EPOCHS)
    return net


@torch.no_grad()
def features(trunk: TrunkNet, images: Tensor) -> Tensor:
    """The trunk's features, FP32 [n, 64], without a gradient."""
    computed: Tensor = trunk(images)
    return computed


@torch.inference_mode()
def accuracy(net: DigitsNet, data: LabelledImages) -> float:
    """The fraction of these images whose digit the network reads correctly."""
    read = net(torch.from_numpy(data.images)).argmax(dim=1)
    return float((read == torch.from_numpy(data.labels)).double().mean())


@torch.inference_mode()
def parity_accuracy(trunk: TrunkNet, parity: nn.Linear, data: LabelledImages) -> float:
    """The fraction of these images for which the network tells odd from even correctly."""
    odd = parity(trunk(torch.from_numpy(data.images)))[:, 0] > 0
    return float((odd == (torch.from_numpy(data.labels) % 2 == 1)).double().mean())


@torch.inference_mode()
def squared_errors(trunk: TrunkNet, decoder: DecoderNet, images: Floats) -> Floats:
    """The mean squared difference of each image to its reconstruction, in squared pixel values 0 to 16; FP32 [n]."""
    originals = torch.from_numpy(images)
    errors: Floats = (decoder(trunk(originals)) - originals).square().mean(dim=(1, 2, 3)).numpy()
    return errors


def main() -> None:
    """Train, print how well each part does on the held-out images, write `WEIGHTS`."""
    torch.set_num_threads(1)  # the order of floating-point sums depends on the number of threads
    torch.use_deterministic_algorithms(True)
    started = time.perf_counter()
    train_data, unseen = split()
    net = train(train_data)
    parity = train_parity(net.trunk, train_data)
    decoder = train_decoder(net.trunk, train_data)
    held_out_accuracy = accuracy(net, unseen)
    held_out_parity = parity_accuracy(net.trunk, parity, unseen)
    errors = squared_errors(net.trunk, decoder, unseen.images)
    metadata = {
        "accuracy": f"{held_out_accuracy:.6f}",
        "parity_accuracy": f"{held_out_parity:.6f}",
        "reconstruction_mse": f"{errors.mean():.6f}",
        "held_out": str(len(unseen.labels)),
        "split_seed": str(SPLIT_SEED),
        "torch": torch.__version__,
    }
    parts = nn.ModuleDict({"trunk": net.trunk, "head": net.head, "parity": parity, "decoder": decoder})
    save_file(parts.state_dict(), WEIGHTS, metadata=metadata)
    # safetensors lets only the owner read the file, but another user may serve a copied tree.
    WEIGHTS.chmod(0o644)
    print(f"train accuracy:    {accuracy(net, train_data):.4f} of {len(train_data.labels)} images")
    print(f"held-out accuracy: {held_out_accuracy:.4f} of {len(unseen.labels)} images")
    print(f"parity, held out:  {held_out_parity:.4f}")
    spread = float(np.square(unseen.images - train_data.images.mean(axis=0)).mean())
    print(f"reconstruction, held out: mean squared error {errors.mean():.3f}; of the mean image {spread:.3f}")
    for kind, images in anomalies(unseen).items():
        print(f"anomaly score against {kind}: AUC {auc(errors, squared_errors(net.trunk, decoder, images)):.4f}")
    print(f"wrote {WEIGHTS} ({WEIGHTS.stat().st_size:,} bytes) in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
