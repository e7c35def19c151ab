"""Augment a batch in one kernel, look at its parameters, and send a gradient back through it.

python examples/augmentation.py
"""

from __future__ import annotations

import torch

from deuteron.augment import (
    ColorJitter,
    HorizontalFlip,
    Normalize,
    Pipeline,
    RandomAffine,
    RandomResizedCrop,
    ToDtype,
    ToLayout,
)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = torch.randint(0, 256, (8, 3, 64, 80), dtype=torch.uint8, device=device)

    aug = Pipeline(
        [
            RandomAffine(degrees=10, translate=(0.1, 0.1), scale=(0.9, 1.1)),
            RandomResizedCrop(48),
            HorizontalFlip(0.5),
            ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1),
            Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
            ToDtype(torch.float16),
            ToLayout("nhwc"),
        ],
        seed=0,
    )
    batch = aug(images)
    print(f"{tuple(images.shape)} {images.dtype} -> {tuple(batch.shape)} {batch.dtype}")

    # The same seed, step and image give the same parameters, on any device and in any batch.
    drawn = aug.parameters_for(8, step=0, size=(64, 80))
    for name in ("0.RandomAffine.angle", "1.RandomResizedCrop.width", "2.HorizontalFlip.happens"):
        print(f"{name:26} {[round(float(v), 1) for v in drawn[name]]}")
    last = aug(images[7:], index=torch.tensor([7]), step=0)
    off = (last - batch[7:]).abs().max().item()  # kernels for other sizes may round differently
    assert off < 0.01, "an image keeps its parameters"

    # Which pixels does a loss depend on? Gradients go through the geometry and the colours.
    floats = (images.float() / 255).requires_grad_()
    aug(floats, step=0).float().square().mean().backward()
    assert floats.grad is not None
    seen = (floats.grad.abs().amax(1) > 0).float().mean((1, 2))
    print(f"part of each image that was used: {[round(float(v), 2) for v in seen]}")


if __name__ == "__main__":
    main()
