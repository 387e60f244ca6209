"""Tensors as raw storage: how the judge hands them to the candidate's process and reads them back.

A tensor crosses as the bytes of its storage in a file, and as metadata (dtype, shape, strides, offset) in JSON. The
judge decides every layout and surrounds the values with poison, so that a read past a tensor shows; what comes back
is measured by the judge itself. Nothing that the candidate's process made is ever unpickled.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)
}
GUARD = 64
"""Elements of poison on either side of the values."""
LAYOUTS = ("plain", "offset", "transposed", "split", "expanded")


class ImageError(Exception):
    """What came back is not a tensor of the contract; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Image:
    """Metadata of one tensor over its storage. Sizes in elements."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    elements: int
    """Of the whole storage."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON form."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any], largest: int) -> Image:
        """Read and check metadata that the candidate's process sent.

        Raises:
            ImageError: anything is not what it must be, or the storage has more than ``largest`` elements.
        """
        try:
            image = cls(
                dtype=data["dtype"],
                shape=tuple(data["shape"]),
                stride=tuple(data["stride"]),
                offset=data["offset"],
                elements=data["elements"],
            )
        except (KeyError, TypeError) as problem:
            raise ImageError(f"malformed metadata: {problem!r}") from problem
        numbers = (*image.shape, *image.stride, image.offset, image.elements)
        if (
            not isinstance(image.dtype, str)
            or image.dtype not in DTYPES
            or not all(type(n) is int and n >= 0 for n in numbers)
        ):
            raise ImageError(f"malformed metadata: {image}")
        if len(image.stride) != len(image.shape) or image.elements > largest:
            raise ImageError(f"a storage of {image.elements} elements for shape {list(image.shape)}")
        reach = image.offset + sum((size - 1) * step for size, step in zip(image.shape, image.stride, strict=True))
        if 0 not in image.shape and reach >= image.elements:
            raise ImageError(f"shape {list(image.shape)} with strides {list(image.stride)} leaves its storage")
        return image

    def view(self, storage: Tensor) -> Tensor:
        """The tensor over its storage [elements]."""
        return storage.as_strided(self.shape, self.stride, self.offset)


def poison(dtype: torch.dtype, large: bool) -> float | int:
    """What surrounds the values: NaN, or values so large that they show in any sum."""
    if not dtype.is_floating_point:
        return 1 if dtype is torch.bool else torch.iinfo(dtype).max // 2
    return torch.finfo(dtype).max / 4 if large else float("nan")


def lay_out(tensor: Tensor, layout: str, *, large: bool = False, expanded_dim: int = 0) -> tuple[Tensor, Image]:
    """A storage that holds ``tensor`` (any shape) in the given layout, and its metadata.

    ``plain`` is contiguous and aligned; ``offset`` contiguous but misaligned by one element; ``transposed`` has the
    last two dims swapped in memory (one dim: every second element); ``split`` is half of a tensor twice as wide;
    ``expanded`` has stride 0 along ``expanded_dim``, where the values must be equal.
    """
    shape = tuple(tensor.shape)
    offset = GUARD + (1 if layout == "offset" else 0)
    if layout == "transposed" and len(shape) >= 2:
        order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
        swapped = contiguous_stride([shape[i] for i in order])
        stride = tuple(swapped[order.index(i)] for i in range(len(shape)))
    elif layout == "transposed":
        stride = tuple(2 * s for s in contiguous_stride(shape))
    elif layout == "split" and shape:
        stride = contiguous_stride((*shape[:-1], 2 * shape[-1]))
        offset += shape[-1]
    elif layout == "expanded":
        kept = [1 if i == expanded_dim else size for i, size in enumerate(shape)]
        stride = tuple(0 if i == expanded_dim else s for i, s in enumerate(contiguous_stride(kept)))
    else:
        stride = contiguous_stride(shape)
    reach = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
    elements = offset + reach + 1 + GUARD
    storage = torch.full((elements,), poison(tensor.dtype, large), dtype=tensor.dtype, device=tensor.device)
    image = Image(
        dtype=str(tensor.dtype).removeprefix("torch."), shape=shape, stride=stride, offset=offset, elements=elements
    )
    if 0 not in shape:
        index = tuple(
            slice(0, 1) if layout == "expanded" and i == expanded_dim else slice(None) for i in range(len(shape))
        )
        image.view(storage)[index].copy_(tensor[index])
    return storage, image


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def save(storage: Tensor, path: Path) -> None:
    """Write the bytes of a storage [elements]."""
    with open(path, "wb") as file:
        storage.detach().cpu().view(torch.uint8).numpy().tofile(file)
    path.chmod(0o644)


def load(path: Path, dtype: torch.dtype, elements: int) -> Tensor:
    """Read exactly the bytes of a storage [elements] from a file that may be hostile.

    Raises:
        ImageError: no regular file of that size is there.
    """
    size = elements * dtype.itemsize
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as problem:
        raise ImageError(f"{path.name}: {problem.strerror}") from problem
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            raise ImageError(f"{path.name}: not a file of {size} bytes")
        content = bytearray(file.read(size))
    if len(content) != size:
        raise ImageError(f"{path.name}: changed while it was read")
    if not size:
        return torch.empty(0, dtype=dtype)
    # bool would trust any byte; every other dtype has a meaning for all bit patterns
    storage = torch.frombuffer(content, dtype=torch.uint8)
    return storage.ne(0) if dtype is torch.bool else storage.view(dtype)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two storages hold the same bits (NaN equals itself)."""

    def raw(t: Tensor) -> Tensor:
        # A dimension of one element may keep any stride and still count as contiguous: copy into plain strides.
        return t.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)

    return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(raw(a), raw(b)))
