"""Arguments and options that several commands share, and the option values that they make up."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

from mergepipe.options import PlanOptions

RecipePath: TypeAlias = Annotated[
    str, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file. Paths in it are relative to it.")
]
SnapshotName: TypeAlias = Annotated[
    str, typer.Argument(metavar="SID|PATH", help="A snapshot's directory, its sid, or four or more first digits of it.")
]
BasePath: TypeAlias = Annotated[
    str, typer.Argument(metavar="BASE", help="The base model: a directory or a .safetensors file.")
]
ExpertPaths: TypeAlias = Annotated[list[str], typer.Argument(metavar="EXPERT...", help="Models fine-tuned from it.")]
PackAlong: TypeAlias = Annotated[
    str | None,
    typer.Option("--pack", metavar="DIR", help="Pack the experts into DIR/NAME on the way, as `pack` would."),
]
OutPath: TypeAlias = Annotated[str, typer.Argument(metavar="OUT", help="The directory to create.")]
ShardSize: TypeAlias = Annotated[
    str | None,
    typer.Option("--shard-size", metavar="SIZE", help="Largest output file, e.g. 5GB.  [default: 5GB]"),
]
Threads: TypeAlias = Annotated[
    int | None,
    typer.Option("--threads", metavar="N", help="Compute threads.  [default: one per processor]"),
]
Memory: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--memory", metavar="SIZE", help="Cap on buffers, e.g. 4GiB.  [default: 4GiB, or half of the RAM if less]"
    ),
]
Seed: TypeAlias = Annotated[
    int, typer.Option("--seed", metavar="N", help="Seed of the random operators, and of --select random.")
]
AllowDropped: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-dropped",
        metavar="GLOB",
        help="Leave out tensors of this name that an expert has and the base has not. May be given again.",
    ),
]
Strict: TypeAlias = Annotated[
    bool, typer.Option("--strict", help="Refuse a recipe with anything in it that has no effect.")
]
Lenient: TypeAlias = Annotated[
    bool, typer.Option("--lenient", help="Take misspelt names for such without effect, as mergekit does.")
]
Force: TypeAlias = Annotated[bool, typer.Option("--force", help="Replace OUT, if mergepipe made it.")]
Resume: TypeAlias = Annotated[
    bool | None,
    typer.Option(
        "--resume/--no-resume",
        help="Resume an interrupted run of the same merge to OUT.  [default: if there is one]",
        show_default=False,
    ),
]
NoReuse: TypeAlias = Annotated[
    bool, typer.Option("--no-reuse", help="Copy no blocks of earlier snapshots that come out the same.")
]
Quiet: TypeAlias = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no report; errors only.")]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object, and no progress.")]
Debug: TypeAlias = Annotated[bool, typer.Option("--debug", help="On failure, print the traceback too.")]

Home: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--home", metavar="DIR", help="Where the catalog is.  [default: $MERGEPIPE_HOME, else the user data folder]"
    ),
]
NoCatalog: TypeAlias = Annotated[bool, typer.Option("--no-catalog", help="Use no catalog, and record nothing in it.")]

BUDGET_HELP = "Read at most this from the experts: bytes (4GiB) or a share of what reading all would cost (25%)."
TargetError: TypeAlias = Annotated[
    float | None,
    typer.Option(
        "--target-error",
        metavar="E",
        help="Spend no more of the budget than is expected to keep the error this small (0.1: a tenth of what merging "
        "changes).",
    ),
]
Select: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--select",
        metavar="POLICY",
        help="What to read first: norm, conflict, stratified or random.  [default: norm]",
    ),
]
OnOmit: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--on-omit",
        metavar="RULE",
        help="Where an expert is omitted: keep the coefficients, or renormalize (linear).  [default: keep]",
    ),
]
BlockElements: TypeAlias = Annotated[
    int | None,
    typer.Option("--block-elements", metavar="N", help="Elements of a block, a multiple of 16384.  [default: 262144]"),
]
Price: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--price",
        metavar="PRICE",
        help="What counts: bytes, or time, the seconds to read and to decode them here.  [default: bytes]",
    ),
]
StorageSpeed: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--storage-speed",
        metavar="SPEED",
        help="With --price time: how fast experts are read, e.g. 200MB/s.  [default: measured once]",
    ),
]
AdjustOperator: TypeAlias = Annotated[
    bool, typer.Option("--adjust-operator", help="Let densities of TIES and DARE fall under a tight budget.")
]
MinDensity: TypeAlias = Annotated[
    float | None,
    typer.Option("--min-density", metavar="SHARE", help="How far --adjust-operator may go.  [default: 0.05]"),
]
DEFAULT_MIN_DENSITY = 0.05


def adjust_min_density(*, adjust_operator: bool, min_density: float | None) -> float | None:
    """The lowest density allowed, None where densities stay as they are.

    Raises:
        RecipeError: `option.pair`, one option without the other that gives it a meaning.
    """
    if adjust_operator:
        return DEFAULT_MIN_DENSITY if min_density is None else min_density
    if min_density is None:
        return None
    from mergepipe.errors import RecipeError

    raise RecipeError.of("option.pair", "--min-density", "it has no meaning by itself", "add --adjust-operator")


def plan_options(
    *,
    select: str | None,
    on_omit: str | None,
    price: str | None,
    storage_speed: str | None,
    adjust_min_density: float | None = None,
    block_elements: int | None = None,
    strict: bool = False,
    lenient: bool = False,
) -> PlanOptions:
    """Return the plan options that were given, with the defaults of `PlanOptions` for the others.

    Raises:
        LimitError, RecipeError: as `PlanOptions`.
    """
    default = PlanOptions()
    return PlanOptions(
        select=select or default.select,
        on_omit=on_omit or default.on_omit,
        adjust_min_density=adjust_min_density,
        block_elements=block_elements,
        price=price or default.price,
        storage_speed=storage_speed,
        strict=strict,
        lenient=lenient,
    )
