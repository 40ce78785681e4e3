"""`mergepipe extract-lora`: keep the difference of a model from its base as a LoRA adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mergepipe.cli.guard import Session
from mergepipe.cli.options import ReportFlags
from mergepipe.cli.outcomes import tell_if_published
from mergepipe.cli.printing import print_report
from mergepipe.cli.progress import progress_shown
from mergepipe.cli.registration import add_command

BasePath = Annotated[str, typer.Argument(metavar="BASE", help="The base: a directory, or a model of the Hub.")]
ModelPath = Annotated[str, typer.Argument(metavar="MODEL", help="The model that was fine-tuned from it.")]
AdapterOut = Annotated[str, typer.Option("--out", "-o", metavar="DIR", help="The directory to create.")]
Rank = Annotated[int | None, typer.Option("--rank", metavar="R", help="Largest rank of a matrix.", show_default=False)]
Energy = Annotated[
    float | None,
    typer.Option("--energy", metavar="SHARE", help="Keep this share of each matrix's square sum.", show_default=False),
]
SaveModules = Annotated[
    bool,
    typer.Option("--save-modules", help="Store embeddings, output heads and norms that changed in full."),
]
BaseModelId = Annotated[
    str | None, typer.Option("--base-model-id", metavar="ID", help="The base on the Hub.", show_default=False)
]

EXAMPLES = (
    "mergepipe extract-lora base/ fine-tuned/ --out adapter/ --rank 32",
    "mergepipe extract-lora base/ fine-tuned/ --out adapter/ --energy 0.9",
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, extract_lora, name="extract-lora", section="Experts", examples=EXAMPLES)


def extract_lora(
    context: typer.Context,
    base: BasePath,
    model: ModelPath,
    *,
    out: AdapterOut,
    rank: Rank = None,
    energy: Energy = None,
    save_modules: SaveModules = False,
    base_model_id: BaseModelId = None,
    printing: ReportFlags,
) -> None:
    """Write the difference of MODEL from BASE as a LoRA adapter.

    Says what the adapter leaves of the difference, and which tensors no LoRA holds.
    """
    session: Session = context.obj
    from mergepipe import api

    with tell_if_published(Path(out)), progress_shown(session, silent=printing.silent) as on_progress:
        report = api.extract_lora(
            base, model, out, rank=rank, energy=energy, save_modules=save_modules, base_model_id=base_model_id,
            on_progress=on_progress,
        )  # fmt: skip
    from mergepipe.cli.render.extraction import extraction_table

    print_report(report, extraction_table, as_json=printing.as_json, quiet=printing.quiet)
