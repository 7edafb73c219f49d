"""Trains the digits networks and writes their weights: ``python -m inference.zoo.training.train_digits``.

Trunk and head are trained together; then, on the trunk as it is, the parity head and the decoder.

The same torch on the same kind of machine writes the same tensors again, to the bit (safetensors shuffles the
metadata in front of them, so the files differ). About a minute on one core. The held-out images serve only for the
figures at the end: no epoch, seed or setting is chosen by them.
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

from inference.zoo.digits_net import MAX_PIXEL, WEIGHTS, DecoderNet, DigitsNet, ParityNet, TrunkNet
from inference.zoo.training.digits_anomalies import Images, Scores, anomalies, auc
from inference.zoo.training.digits_data import SPLIT_SEED, LabelledImages, split

__all__ = ["accuracy", "main", "train", "train_decoder", "train_parity"]

SEED: Final = 0
EPOCHS: Final = 60
DECODER_EPOCHS: Final = 200
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


def fit(net: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor], data: LabelledImages, epochs: int) -> None:
    """Lower a loss of shifted images and their labels. The network ends in evaluation mode."""
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
    """Train trunk and head from scratch on these images. They are returned in evaluation mode, on the CPU."""
    torch.manual_seed(SEED)
    net = DigitsNet()
    loss = nn.CrossEntropyLoss(label_smoothing=0.05)
    fit(net, lambda images, labels: loss(net(images), labels), data, EPOCHS)
    return net


def train_parity(trunk: TrunkNet, data: LabelledImages) -> ParityNet:
    """Train the parity head from scratch on a trunk that stays as it is."""
    torch.manual_seed(SEED)
    net = ParityNet()
    loss = nn.BCEWithLogitsLoss()
    fit(net, lambda images, labels: loss(net(features(trunk, images))[:, 0], (labels % 2).float()), data, EPOCHS)
    return net


def train_decoder(trunk: TrunkNet, data: LabelledImages) -> DecoderNet:
    """Train the decoder from scratch on a trunk that stays as it is."""
    torch.manual_seed(SEED)
    net = DecoderNet()

    def loss_of(images: Tensor, labels: Tensor) -> Tensor:
        return functional.mse_loss(net(features(trunk, images)) / MAX_PIXEL, images / MAX_PIXEL)

    fit(net, loss_of, data, DECODER_EPOCHS)
    return net


@torch.no_grad()
def features(trunk: TrunkNet, images: Tensor) -> Tensor:
    """The trunk's features, as a constant: FP32 [n, 64]."""
    computed: Tensor = trunk(images)
    return computed


@torch.inference_mode()
def accuracy(net: DigitsNet, data: LabelledImages) -> float:
    """The fraction of these images that the network reads rightly."""
    read = net(torch.from_numpy(data.images)).argmax(dim=1)
    return float((read == torch.from_numpy(data.labels)).double().mean())


@torch.inference_mode()
def parity_accuracy(trunk: TrunkNet, parity: ParityNet, data: LabelledImages) -> float:
    """The fraction of these images whose digit is rightly found to be odd or even."""
    odd = parity(trunk(torch.from_numpy(data.images)))[:, 0] > 0
    return float((odd == (torch.from_numpy(data.labels) % 2 == 1)).double().mean())


@torch.inference_mode()
def squared_errors(trunk: TrunkNet, decoder: DecoderNet, images: Images) -> Scores:
    """Of each image, the mean squared difference to its reconstruction, in squared pixel values 0 to 16; FP32 [n]."""
    given = torch.from_numpy(images)
    errors: Scores = (decoder(trunk(given)) - given).square().mean(dim=(1, 2, 3)).numpy()
    return errors


def main() -> None:
    """Train, print how well each part does on the held-out images, write `WEIGHTS`."""
    # The order of floating-point sums depends on the number of threads.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    started = time.perf_counter()
    train_data, unseen = split()
    net = train(train_data)
    parity = train_parity(net.trunk, train_data)
    decoder = train_decoder(net.trunk, train_data)
    held_out_accuracy = accuracy(net, unseen)
    held_out_parity = parity_accuracy(net.trunk, parity, unseen)
    errors = squared_errors(net.trunk, decoder, unseen.images)
    WEIGHTS.parent.mkdir(exist_ok=True)
    metadata = {
        "accuracy": f"{held_out_accuracy:.6f}",
        "parity_accuracy": f"{held_out_parity:.6f}",
        "reconstruction_mse": f"{errors.mean():.6f}",
        "held_out": str(len(unseen.labels)),
        "split_seed": str(SPLIT_SEED),
        "torch": torch.__version__,
    }
    parts = {"parity": parity, "decoder": decoder}
    weights = net.state_dict()
    weights |= {f"{name}.{key}": weight for name, part in parts.items() for key, weight in part.state_dict().items()}
    save_file(weights, WEIGHTS, metadata=metadata)
    # safetensors writes it for the owner only, and a copied tree may be served by another user.
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
