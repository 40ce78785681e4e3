"""Matrix products of bfloat16 on processors that have no instructions for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
_PRODUCTS = frozenset(
    (
        _ATEN.mm.default,
        _ATEN.bmm.default,
        _ATEN.addmm.default,
        _ATEN.linear.default,
        _ATEN.scaled_dot_product_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default,
    )
)


def bf16_products() -> AbstractContextManager[object]:
    """Return the context in which matrix products of bfloat16 factors, forward and backward, take the usual time.

    Without instructions for them (on x86 those of AVX-512) torch takes ten times as long as in float32. There the
    factors are multiplied in float32 and the result is rounded: what the instructions do, which add up in float32
    too, but for the order of the sums.
    """
    return nullcontext() if torch.ops.mkldnn._is_mkldnn_bf16_supported() else WidenedProducts()


class WidenedProducts(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed here
    """Multiply bfloat16 factors in float32, and round the products."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _PRODUCTS or args[0].dtype != torch.bfloat16:
            return func(*args, **(kwargs or {}))
        results = func(*map(_widened, args), **(kwargs or {}))
        n_dims = args[0].ndim
        if isinstance(results, torch.Tensor):
            return _rounded(results, n_dims)
        return tuple(_rounded(result, n_dims) for result in results)


def _widened(argument: Any) -> Any:
    is_bf16 = isinstance(argument, torch.Tensor) and argument.dtype == torch.bfloat16
    return argument.float() if is_bf16 else argument


def _rounded(result: torch.Tensor, n_dims: int) -> torch.Tensor:
    """Round a product; what attention keeps for its backward pass, a number a row, is float32 in torch's own too."""
    return result.bfloat16() if result.ndim == n_dims else result
