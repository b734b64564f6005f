"""Images in folders, one folder for each class."""

import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from bamboo_core.complaints import said_by
from bamboo_trainer.data.order import pure_seed
from bamboo_trainer.data.sources import Sources
from bamboo_trainer.task import Parts

SUFFIXES: Final = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
IMAGENET_MEAN: Final = (0.485, 0.456, 0.406)
IMAGENET_STD: Final = (0.229, 0.224, 0.225)
_ASPECTS: Final = (3 / 4, 4 / 3)
_TRIES: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """The preparation of images.

    size: pixels of a side. augment: a random part of the image of at least `least_area` of its area, mirrored in half
    of the cases; otherwise the middle of it. mean, std: of the channels, which are normalized by them.
    """

    size: int = 224
    augment: bool = False
    least_area: float = 0.08
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")
        if not 0 < self.least_area <= 1:
            raise ValueError(f"leastArea must be above 0 and at most 1, got {self.least_area}")
        if not all(value > 0 for value in self.std):
            raise ValueError(f"std must be positive, got {list(self.std)}")


class ImageFolder:
    """Images as samples: inputs float32 [samples, 3, size, size], targets int64 [samples], the number of the class.

    A file's class is the topmost folder that contains it. classes: their names in the order of their numbers, some of
    which may have no image here; by default the folders, none of which may be empty. variants: samples per image, which
    differ in their augmentation; sample i is of image i // variants.

    Raises ValueError.
    """

    def __init__(
        self, sources: Sources, options: ImageOptions | None = None, variants: int = 1, classes: Sequence[str] = ()
    ) -> None:
        try:
            from PIL import Image
        except ImportError:
            raise ValueError("the library pillow is not installed: pip install 'bamboo-trainer[images]'") from None
        self._pillow = Image
        self._options, self._variants = options or ImageOptions(), variants
        if variants < 1 or (variants > 1 and not self._options.augment):
            raise ValueError(f"variants must be at least 1, and 1 without augment, got {variants}")
        named = [_class_of(source.name, sources.root) for source in sources.files]
        stray = [source.name for source, name in zip(sources.files, named, strict=True) if not name]
        if stray:
            raise ValueError(f"{stray[0]} is in no folder of a class below {sources.root}")
        self.classes = tuple(classes) or _all_classes(sources, named)
        _require_classes(self.classes, named)
        numbers = {name: number for number, name in enumerate(self.classes)}
        self._samples = [(source, numbers[name]) for source, name in zip(sources.files, named, strict=True)]

    def __len__(self) -> int:
        return len(self._samples) * self._variants

    def batch(self, indices: Sequence[int]) -> tuple[Parts, Parts]:
        images = torch.stack([self._image(index) for index in indices])
        return (images,), (torch.tensor([self._samples[i // self._variants][1] for i in indices]),)

    def _image(self, index: int) -> Tensor:
        """Return an image as float32 [3, size, size]."""
        source = self._samples[index // self._variants][0]
        try:
            with self._pillow.open(io.BytesIO(source.content())) as opened:
                image = opened.convert("RGB")
        except (OSError, SyntaxError, ValueError, self._pillow.DecompressionBombError) as error:
            raise ValueError(f"{source.name} is no image that can be read: {said_by(error)}") from None
        options, size = self._options, (self._options.size, self._options.size)
        choice = random.Random(pure_seed("image", index))
        box = _random_box(image.size, options.least_area, choice) if options.augment else _middle(image.size)
        image = image.resize(size, self._pillow.Resampling.BILINEAR, box=box, reducing_gap=None)
        if options.augment and choice.random() < 0.5:
            image = image.transpose(self._pillow.Transpose.FLIP_LEFT_RIGHT)
        return self._normalized(image)

    def _normalized(self, image: Any) -> Tensor:
        pixels = torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1).float() / 255
        mean, std = torch.tensor(self._options.mean), torch.tensor(self._options.std)
        return ((pixels - mean[:, None, None]) / std[:, None, None]).contiguous()


def _all_classes(sources: Sources, named: Sequence[str]) -> tuple[str, ...]:
    found = sorted({*named, *sources.folders})
    if empty := [name for name in found if name not in set(named)]:
        raise ValueError(
            f"{sources.root}/{empty[0]} has no image, so it is no class; remove it, or name all classes as `classes`"
        )
    return tuple(found)


def _require_classes(classes: Sequence[str], named: Sequence[str]) -> None:
    """Raise ValueError unless the classes differ and include the classes of all files."""
    if len(set(classes)) < len(classes):
        raise ValueError(f"classes must be different names, got {list(classes)}")
    if unknown := sorted(set(named) - set(classes)):
        raise ValueError(f"there are images of a class {unknown[0]!r}, which is none of classes: {', '.join(classes)}")


def _class_of(name: str, root: str) -> str:
    """Return the file's class; "" if the file is not in a folder below the root."""
    folder, slash, _ = name[len(root) :].lstrip("/").partition("/")
    return folder if slash else ""


def _middle(size: tuple[int, int]) -> tuple[float, float, float, float]:
    """Return the largest square in the middle."""
    width, height = size
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _random_box(size: tuple[int, int], least_area: float, choice: random.Random) -> tuple[float, float, float, float]:
    """Return a part of the image with a random share of its area and a random aspect ratio; the middle if none fits."""
    width, height = size
    for _ in range(_TRIES):
        area = width * height * choice.uniform(least_area, 1.0)
        aspect = _ASPECTS[0] * (_ASPECTS[1] / _ASPECTS[0]) ** choice.random()
        wide, high = round((area * aspect) ** 0.5), round((area / aspect) ** 0.5)
        if 0 < wide <= width and 0 < high <= height:
            left, top = choice.randint(0, width - wide), choice.randint(0, height - high)
            return left, top, left + wide, top + high
    return _middle(size)
