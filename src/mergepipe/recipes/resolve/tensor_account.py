"""Account for every input tensor: used, or dropped for a reason; report unexpected ones."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

from mergepipe.checkpoints.computed.embedding_names import is_head
from mergepipe.core.blocks import DTypeKind
from mergepipe.errors import MismatchError
from mergepipe.recipes.parse.problems import Findings
from mergepipe.recipes.parse.recipe import Recipe
from mergepipe.recipes.resolve.layers import template
from mergepipe.recipes.resolve.name_patterns import count_text, group_by_pattern
from mergepipe.recipes.resolve.output_tensors import OpenModel, OutputTensor, is_allowed
from mergepipe.recipes.resolve.tasks import DroppedTensor

REASON_EXACT = "integer or boolean buffer"
REASON_COMPUTED = "buffer that a model computes itself"
REASON_COPIED = "copied from the base"
REASON_NO_MODULE = "in no module of the recipe"
REASON_ALLOWED = "not in the base, allowed to be dropped"
REASON_LAYER = "in a layer that no slice takes"
REASON_AROUND = "outside the layers, taken from another slice"
REASON_LENDER = "lends its configuration only"

# Buffers that some models store and recompute on loading.
_COMPUTED = re.compile(r"(^|\.)(rotary_emb|rotary_pos_emb|rotary_embedding)\.\w+$|(^|\.)attn\.(masked_bias|bias)$")
_MASK_DIMENSIONS = 4
_KEEP_HEAD = (
    " (nothing is lost where it equals the embedding); to keep it, give the base a head of its own: store its "
    "embedding as '{}', too"
)


def is_computed(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor is a buffer that models recompute: rotary frequencies, causal masks."""
    if _COMPUTED.search(name) is None:
        return False
    return "rotary" in name or len(shape) in (0, _MASK_DIMENSIONS)


class TensorAccount:
    """Finds the reason for each tensor that no task uses."""

    def __init__(
        self,
        recipe: Recipe,
        models: Sequence[OpenModel],
        outputs: Sequence[OutputTensor],
        used: Sequence[set[str]],
        allow: Sequence[str],
    ) -> None:
        self._models = models
        self._used = used
        self._allow = allow
        self._is_sliced = not recipe.models
        self._names = {output.name for output in outputs}
        self._templates = {template(output.name) for output in outputs if output.group is not None}
        taking_part = {output.model for output in outputs}
        taking_part |= {member.model for output in outputs if output.group for member in output.group.experts}
        self._taking_part = taking_part

    def dropped(self, findings: Findings, unrelated: Collection[int] = ()) -> Iterator[DroppedTensor]:
        """List every tensor that no task uses, by model in storage order; report unexpected ones.

        Of `unrelated` models enough was said before.
        """
        for index, model in enumerate(self._models):
            unexpected: list[str] = []
            for name, entry in model.tensors.items():
                if name in self._used[index]:
                    continue
                reason = self._reason(index, name)
                stored = entry.name
                if reason is None and is_allowed(model, name, self._allow):
                    reason = REASON_ALLOWED
                if reason is not None:
                    yield DroppedTensor(model.input.text, stored, reason)
                else:
                    unexpected.append(stored)
            if index not in unrelated:
                self._note_unexpected(model, unexpected, findings)

    def _note_unexpected(self, model: OpenModel, names: Sequence[str], findings: Findings) -> None:
        base = self._models[0].input.text
        for pattern, group in group_by_pattern(names).items():
            message = f"'{model.input.text}' has {count_text(group)}, the base '{base}' has not"
            hint = f"to leave {'it' if len(group) == 1 else 'them'} out: --allow-dropped '{pattern}'"
            if is_head(pattern):
                hint += _KEEP_HEAD.format(pattern)
            findings.add(MismatchError, "merge.tensor.unexpected", pattern, message, hint)

    def _reason(self, index: int, name: str) -> str | None:
        """Return why a tensor is expected to be unused; empty if it is not."""
        entry = self._models[index].tensors[name]
        if index not in self._taking_part:
            return REASON_LENDER
        if self._is_sliced and template(name) in self._templates:
            return REASON_LAYER if template(name) != name else REASON_AROUND
        if name in self._names:
            return REASON_COPIED
        if entry.dtype.kind is DTypeKind.EXACT:
            return REASON_EXACT
        return REASON_COMPUTED if is_computed(name, entry.shape) else None
