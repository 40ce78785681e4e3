"""Copy bytes inside kernels: assigning a slice takes a loop of single bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mergepipe.deltastore.codec.entropy.llvm_vectors import array_pointers, core
from mergepipe.kernels.compilation.compiled import intrinsic


def _copy_bytes_intrinsic(_typing: Any, content: Any, n: Any, out: Any, at: Any) -> tuple[Any, Callable[..., Any]]:
    """LLVM: copy the first `n` bytes of `content` to `out`, from byte `at` on; the two do not overlap."""
    signature = core.types.void(content, n, out, at)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        content_pointer, count, out_pointer, start = array_pointers(context, builder, signature, arguments)
        core.cgutils.raw_memcpy(builder, builder.gep(out_pointer, [start]), content_pointer, count, 1)
        return context.get_dummy_value()

    return signature, generate


copy_bytes: Any = intrinsic(_copy_bytes_intrinsic)
