# Written by `python -m tools.stubs` from the functions and options.py; not edited by hand.

from collections.abc import (
    Sequence,
)
from mergepipe.options import (
    ComposeOptions,
    ExportOptions,
    ModelOptions,
)
from mergepipe.reports import (
    ProgressCallback,
)
from mergepipe.tailor.api import (
    check as check,
    diff as diff,
    inspect as inspect,
    recipe as recipe,
)
from mergepipe.tailor.averaging import (
    Averager as Averager,
)
from mergepipe.tailor.composition import (
    CompositionReport,
)
from pathlib import (
    Path,
)

__all__: list[str]

def average(
    checkpoints: Sequence[str | Path],
    out: str | Path,
    *,
    options: ModelOptions | None = None,
    on_progress: ProgressCallback | None = None,
    self_check: str = 'sampled',
    memory: int | str | None = None,
    memory_bytes: int = 268435456,
    force: bool = False,
    dtype: str | None = None,
    rounding: str | None = None,
    config: str | Path | None = None,
    adapter_config: str | Path | None = None,
    lora_alpha: float | None = None,
    strict: bool = False,
    weights: str | float | Sequence[float] = 'sma',
    alpha: float | None = None,
    optimizer: str = 'none',
) -> CompositionReport:
    """Average checkpoints of one run, a pass over all of them, and publish the result at `out`.

    Of checkpoints with an adapter of PEFT beside its base the models are averaged that these make together.
    """

def compose(
    recipe: str | Path,
    out: str | Path,
    *,
    options: ComposeOptions | None = None,
    on_progress: ProgressCallback | None = None,
    self_check: str = 'sampled',
    memory: int | str | None = None,
    memory_bytes: int = 268435456,
    force: bool = False,
    state_from: str | Path | None = None,
    export: str | None = None,
) -> CompositionReport:
    """Compose a training checkpoint as the recipe says and publish it at `out`, complete or not at all."""

def export(
    checkpoint: str | Path,
    out: str | Path,
    *,
    options: ExportOptions | None = None,
    on_progress: ProgressCallback | None = None,
    self_check: str = 'sampled',
    memory: int | str | None = None,
    memory_bytes: int = 268435456,
    force: bool = False,
    dtype: str | None = None,
    rounding: str | None = None,
    config: str | Path | None = None,
    adapter_config: str | Path | None = None,
    lora_alpha: float | None = None,
    strict: bool = False,
    adapter: bool = False,
) -> CompositionReport:
    """Make a Hugging Face model of a training checkpoint and publish it at `out`: the average of one.

    Weights are the float32 masters where there are any, rounded once, else the model's own. An adapter of PEFT beside
    its base is folded into it, or written alone (`adapter`).

    Args:
        checkpoint: of any format; of a partial one, all weights must be there.
    """
