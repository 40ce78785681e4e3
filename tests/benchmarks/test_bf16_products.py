"""benchmarks.bf16_products: bfloat16 factors multiplied in float32, in forward and backward passes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

pytestmark = [pytest.mark.transformers, pytest.mark.slow]  # `make test-benchmarks`, which CI runs too

N_ROWS, N_INNER, N_COLUMNS = 24, 96, 40


def model_gradients(weight: Any, inputs: Any, *, widened: bool) -> tuple[Any, Any, Any]:
    """Output, gradient of the weight and of the inputs, of a linear layer and attention under autocast."""
    import torch
    from benchmarks.bf16_products import WidenedProducts

    weight, inputs = weight.clone().requires_grad_(), inputs.clone().requires_grad_()
    with WidenedProducts() if widened else nullcontext():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rows = torch.nn.functional.linear(inputs, weight).view(1, 2, N_ROWS, N_COLUMNS // 2)
            output = torch.nn.functional.scaled_dot_product_attention(rows, rows, rows, is_causal=True)
        output.float().pow(2).sum().backward()
    return output, weight.grad, inputs.grad


def test_a_product_is_the_exact_one_of_the_rounded_factors_rounded_once() -> None:
    import torch
    from benchmarks.bf16_products import WidenedProducts

    generator = torch.Generator().manual_seed(0)
    left = torch.randn(N_ROWS, N_INNER, generator=generator).bfloat16()
    right = torch.randn(N_INNER, N_COLUMNS, generator=generator).bfloat16()
    with WidenedProducts():
        product = left @ right
        with torch.inference_mode():
            inferred = torch.nn.functional.linear(left, right.T)
    exact = left.double() @ right.double()
    assert product.dtype == torch.bfloat16
    assert torch.equal(product, inferred)
    assert ((product.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-4).all()


def test_layers_and_their_gradients_are_torch_s_own_but_for_rounding() -> None:
    import torch

    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(N_COLUMNS, N_INNER, generator=generator) / N_INNER**0.5
    inputs = torch.randn(N_ROWS, N_INNER, generator=generator)
    ours = model_gradients(weight, inputs, widened=True)
    own = model_gradients(weight, inputs, widened=False)
    for mine, theirs in zip(ours, own, strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine - theirs).float().norm() <= 0.01 * theirs.float().norm()
        assert theirs.float().norm() > 0


def test_products_of_float32_stay_what_they_are() -> None:
    import torch
    from benchmarks.bf16_products import WidenedProducts

    left, right = torch.randn(5, 7), torch.randn(7, 3)
    expected = left @ right
    with WidenedProducts():
        assert torch.equal(left @ right, expected)


def test_no_pass_of_a_model_is_left_with_a_product_of_bfloat16() -> None:
    import torch
    from benchmarks.bf16_products import WidenedProducts
    from benchmarks.tiny_lm import LmShape, new_model
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed here
        """The products that reach torch, by whether a factor is bfloat16."""

        def __init__(self) -> None:
            super().__init__()
            self.of_bf16: dict[bool, set[str]] = {False: set(), True: set()}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(word in str(func) for word in ("mm", "matmul", "linear", "attention")):
                is_bf16 = any(isinstance(arg, torch.Tensor) and arg.dtype == torch.bfloat16 for arg in args)
                self.of_bf16[is_bf16].add(str(func))
            return func(*args, **(kwargs or {}))

    model = new_model(LmShape(vocab=64, hidden=32, layers=1, kv_heads=1, head_dim=16, intermediate=64, context=32), 0)
    batch = torch.arange(32).view(2, 16)
    with Seen() as seen, WidenedProducts():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
    attention = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert {"aten.mm.default", f"{attention}.default", f"{attention}_backward.default"} <= seen.of_bf16[False]
    assert not seen.of_bf16[True]
