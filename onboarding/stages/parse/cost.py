"""FLOPs and bytes of one aten operator, from its shapes. A multiply-add counts as two."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_FREE = {
    "detach", "alias", "empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided", "lift_fresh",
    "_local_scalar_dense", "is_same_size", "sym_size", "_unsafe_view", "_reshape_alias", "expand_as",
}  # fmt: skip


def tensors_of(values: Any) -> list[torch.Tensor]:
    """All tensors in a nest of arguments."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> float:
    """Bytes of the tensors as they are read: an expanded dim of stride 0 is read once."""
    total = 0.0
    for tensor in tensors:
        count = 1
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            count *= size if stride != 0 else 1
        total += count * tensor.element_size()
    return total


def is_free(func: Any) -> bool:
    """Views and allocations: they move nothing."""
    namespace, _, name = func._schema.name.partition("::")
    if namespace == "prim" or name in _FREE:
        return True
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def is_matmul(func: Any) -> bool:
    """Whether the operator runs on matrix units (it has a FLOP formula in torch)."""
    return func._overloadpacket in flop_registry


def operator_cost(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[float, float]:
    """FLOPs and bytes moved of one call.

    Matrix products and convolutions by torch's formulas; everything else one operation an element of its largest
    operand. Bytes: every input read once, every output written once (an index reads what it selects).
    """
    inputs, outputs = tensors_of((args, kwargs)), tensors_of(result)
    name = func._schema.name.partition("::")[2]
    written = tensor_bytes(outputs)
    if name in ("index", "index_select", "gather", "embedding"):
        read = written + tensor_bytes(inputs[1:])
    elif name in ("scatter", "scatter_", "scatter_add", "scatter_add_", "index_put", "index_put_", "_index_put_impl_"):
        read = tensor_bytes(inputs[1:])
    else:
        read = tensor_bytes(inputs)
    if name == "convolution_backward":
        return _convolution_backward_flops(args), read + written
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        return float(formula(*args, **kwargs, out_val=result)), read + written
    largest = max((float(t.numel()) for t in (*inputs, *outputs)), default=0.0)
    moves_only = name in (
        "clone",
        "_to_copy",
        "copy_",
        "cat",
        "zeros_like",
        "zero_",
        "fill_",
        "index",
        "gather",
        "embedding",
    )
    return 0.0 if moves_only else largest, read + written


def _convolution_backward_flops(args: Any) -> float:
    """2 x elements of grad_out x elements of one filter, for each gradient asked for.

    torch's own formula ignores groups: a depthwise convolution would count as a full one.
    """
    grad_out, weight, mask = args[0], args[2], args[-1]
    one: float = 2.0 * grad_out.numel() * (weight.numel() // weight.shape[0])
    return one * sum(bool(wanted) for wanted in mask[:2])
