"""Find the kernels that make the model deviate."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def culprits(digests: Sequence[str], fails: Callable[[Sequence[str]], bool]) -> list[str]:
    """The guilty among ``digests``, which are known to fail together.

    Halves are tried alone, and each half that fails is halved again. Where neither half fails alone, the fault needs
    both, and all of them are guilty.

    Args:
        digests: at least one.
        fails: whether the model deviates with just these kernels.
    """
    if len(digests) == 1:
        return list(digests)
    middle = len(digests) // 2
    halves = (digests[:middle], digests[middle:])
    guilty = [digest for half in halves if fails(half) for digest in culprits(half, fails)]
    return guilty or list(digests)
