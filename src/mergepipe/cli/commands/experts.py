"""Commands on experts: `pack`, `unpack`, and `lora apply`, `check`, `merge`, `convert` and `extract`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from click.exceptions import Exit

import mergepipe
from mergepipe.cli.app import EXPERT_PART, OutDirectory, OutOption, Without, command
from mergepipe.cli.printing import ReportOptions, print_report, report_json
from mergepipe.cli.progress import OnProgress
from mergepipe.core.display import Displayed
from mergepipe.core.flags import Argument, Flag
from mergepipe.core.outcome import tell_what_is_published
from mergepipe.errors import CorruptError, MismatchError, RecipeError
from mergepipe.options import (
    ApplyLoraOptions,
    CheckLoraOptions,
    ConvertLoraOptions,
    ExtractLoraOptions,
    MergeLoraOptions,
    PackOptions,
    UnpackOptions,
)

NOT_APPLIED_EXIT_CODE = CorruptError.exit_code
UNKNOWN_EXIT_CODE = MismatchError.exit_code


@command(
    "mergepipe pack base/ expert-1/ expert-2/ --out packed/",
    "mergepipe pack expert-1/ expert-2/ --base base/ --base other/ --out packed/",
    "mergepipe pack base/ step-100/ step-200/ step-300/ --chain 8 --out packed/",
    "mergepipe pack base/ expert-1/ --out s3://bucket/packed",
    "mergepipe pack base/ expert-*/ --out packed/ --part 2/4",
    "mergepipe pack model/ --out packed/",
)
def pack(
    models: Annotated[
        list[str],
        Argument(
            "[BASE] EXPERT...",
            "The base, and models fine-tuned from it; with --base only the models; or one model alone.",
        ),
    ],
    *,
    out: Annotated[
        str,
        Flag(
            "Where the packs are written, as DIR/NAME for an expert named NAME. A folder, or a prefix of a bucket.",
            short="-o",
            metavar="DIR",
        ),
    ],
    base: Annotated[
        list[str] | None,
        Flag("A possible base; each EXPERT is packed on the nearest one. May be given several times.", metavar="BASE"),
    ] = None,
    part: Annotated[str | None, EXPERT_PART] = None,
    options: PackOptions,
    on_progress: OnProgress,
) -> Displayed:
    """Store each EXPERT, without loss, as its difference from BASE.

    With several bases, each EXPERT is packed on the nearest one, determined from samples. A model without a base
    is packed by itself, to about two thirds of its size. Every element is checked while it is packed. All
    experts are read in one pass with BASE. An interrupted pack is resumed.
    """
    from mergepipe.jobs.parts import experts_of_part

    if options.chain is not None and part is not None:
        raise RecipeError.of("option.conflict", "--part", "a chain is packed by one machine", "leave it out")
    has_bases = base or len(models) == 1  # one model alone is packed on its own
    bases, experts = (base, models) if has_bases else (models[:1], models[1:])
    part_experts = experts_of_part(experts, part)
    with tell_what_is_published():
        return mergepipe.pack(bases, part_experts, out, options=options, on_progress=on_progress)


@command("mergepipe unpack packed/expert-1 --out expert-1/")
def unpack(
    store: Annotated[str, Argument("STORE", "A packed expert, as `pack` writes it.")],
    *,
    out: OutDirectory,
    options: UnpackOptions,
    on_progress: OnProgress,
) -> Displayed:
    """Restore the files that were packed into STORE, byte for byte."""
    return mergepipe.unpack(store, out, options=options, on_progress=on_progress)


@command(
    "mergepipe lora apply base/ adapter/ -o merged/",
    "mergepipe lora apply org/base org/adapter -o s3://bucket/merged",
    "mergepipe lora apply base/ first/ second/ --weight 0.7 --weight 0.3 -o merged/",
    name="lora apply",
)
def apply_lora(
    base: Annotated[
        str,
        Argument("BASE", "The base model: a directory, or an address in a bucket or on the Hub."),
    ],
    adapters: Annotated[
        list[str], Argument("ADAPTER...", "LoRA adapters of BASE, in any form that `lora convert` reads.")
    ],
    *,
    out: OutOption,
    options: Annotated[ApplyLoraOptions, Without("executor"), Without("address")],
    on_progress: OnProgress,
) -> Displayed:
    """Add the deltas of each ADAPTER to BASE.

    OUT appears when it is complete, or not at all. An interrupted run is resumed. A module of an ADAPTER that BASE
    lacks is an error.
    """
    return mergepipe.apply_lora(base, adapters, out, options=options, on_progress=on_progress)


@command(
    "mergepipe lora check base/ adapter/ merged/",
    "mergepipe lora check org/base org/adapter s3://bucket/merged --json",
    "mergepipe lora check base/ adapter/",
    name="lora check",
)
def check_lora(
    base: Annotated[str, Argument("BASE", "The base model: a directory, or an address in a bucket or on the Hub.")],
    adapter: Annotated[str, Argument("ADAPTER", "A LoRA adapter of BASE, in any form that `lora convert` reads.")],
    model: Annotated[str | None, Argument("MODEL", "The model that is said to be BASE with ADAPTER.")] = None,
    *,
    options: CheckLoraOptions,
    printing: ReportOptions,
    on_progress: OnProgress,
) -> None:
    """Tell whether MODEL is BASE with ADAPTER applied, tensor by tensor.

    Compares what is stored with the exact result, rounded to MODEL's dtype. Without MODEL, checks that ADAPTER fits
    BASE: names, shapes, ranks, zeros, infinities and NaN. Exit code 0: applied, or fits; 4: not, or not all of it;
    5: cannot be told, or BASE lacks modules.
    """
    report = mergepipe.check_lora(base, adapter, model, options=options, on_progress=on_progress)
    if printing.as_json:
        print(report_json(report))
    else:
        print_report(report, replace(printing, quiet=printing.quiet and report.is_applied is True))
    if report.is_applied is not True:
        raise Exit(UNKNOWN_EXIT_CODE if report.is_applied is None else NOT_APPLIED_EXIT_CODE)


@command(
    "mergepipe lora merge first/ second/ -o both/",
    "mergepipe lora merge first/ second/ --weight 0.7 --weight 0.3 --method svd --rank 16 -o both/",
    "mergepipe lora merge first/ second/ third/ --method ties --density 0.3 -o all/",
    "mergepipe lora merge first/ second/ -o hf://org/both",
    name="lora merge",
)
def merge_lora(
    adapters: Annotated[
        list[str],
        Argument("ADAPTER...", "LoRA adapters of one base, in any form, or a recipe with `output: adapter`."),
    ],
    *,
    out: OutOption,
    options: MergeLoraOptions,
    on_progress: OnProgress,  # noqa: ARG001 - it has the options of those that run long
) -> Displayed:
    """Merge several ADAPTERs into one adapter.

    Does not read the base. OUT appears when it is complete, or not at all, with a card and a record.
    Prints the share of the merged deltas that the adapter keeps.
    """
    return mergepipe.merge_lora(adapters, out, options=options)


@command(
    "mergepipe lora convert adapter/ --to vllm -o served/",
    "mergepipe lora convert adapter/ --to gguf --base base/ -o llama-cpp/",
    "mergepipe lora convert style.safetensors --to diffusers --base pipeline/ -o style/",
    "mergepipe lora convert adapter/ --experts stacked -o for-transformers-5/",
    name="lora convert",
)
def convert_lora(
    adapter: Annotated[
        str,
        Argument("ADAPTER", "A LoRA adapter: a folder of PEFT, MLX or Tinker, or a .safetensors or .gguf file."),
    ],
    *,
    out: OutOption,
    options: ConvertLoraOptions,
    on_progress: OnProgress,  # noqa: ARG001 - it has the options of those that run long
) -> Displayed:
    """Write ADAPTER in the form that another program reads.

    The form of ADAPTER is recognised. OUT appears when it is complete, or not at all, with a card and a record.
    Prints where the scale of its deltas went. What a form cannot hold is an error that names it.
    """
    return mergepipe.convert_lora(adapter, out, options=options)


@command(
    "mergepipe lora extract base/ fine-tuned/ --out adapter/ --rank 32",
    "mergepipe lora extract base/ fine-tuned/ --out adapter/ --energy 0.9",
    name="lora extract",
)
def extract_lora(
    base: Annotated[str, Argument("BASE", "The base model: a directory, or a model on the Hub.")],
    model: Annotated[str, Argument("MODEL", "The model that was fine-tuned from it.")],
    *,
    out: OutOption,
    options: ExtractLoraOptions,
    on_progress: OnProgress,
) -> Displayed:
    """Write the difference of MODEL from BASE as a LoRA adapter.

    OUT appears when it is complete, or not at all, with a card and a record.
    Prints the share of the difference that the adapter lacks, and the tensors that no LoRA can hold.
    """
    return mergepipe.extract_lora(base, model, out, options=options, on_progress=on_progress)
