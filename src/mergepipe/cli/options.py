"""Arguments and options that several commands share, and groups of options that make up one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

import typer

from mergepipe.cli.completion import choices
from mergepipe.cli.sizes import optional_size
from mergepipe.options import ExecutorName, PathStyle, PlanOptions, RunOptions
from mergepipe.storage.traffic import CONNECTIONS

BUDGET_PANEL = "Under a budget"
WORK_PANEL = "Catalog and earlier work"
PUBLISHING_PANEL = "What the output says of its inputs"
MACHINE_PANEL = "Machine"
PARTS_PANEL = "Many machines"
PRINT_PANEL = "Printing"

RecipePath: TypeAlias = Annotated[
    str, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file. Paths in it are relative to it.")
]
SnapshotName: TypeAlias = Annotated[
    str, typer.Argument(metavar="SID|PATH", help="A snapshot's directory, its sid, or four or more first digits of it.")
]
ExpertPart: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--part",
        metavar="I/N",
        help="Take part I of N of the experts only: every N-th of them, from the I-th on.",
        rich_help_panel="Many machines",
    ),
]
OUT_HELP = "The directory to create, or a prefix of a bucket: s3://bucket/prefix, gs://, az://."
OutPath: TypeAlias = Annotated[str, typer.Argument(metavar="OUT", help=OUT_HELP)]
ShardSize: TypeAlias = Annotated[
    str | None,
    typer.Option("--shard-size", metavar="SIZE", help="Largest output file, e.g. 5GB.  [default: 5GB]"),
]
Threads: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--threads", metavar="N", help="Compute threads.  [default: one per processor]", rich_help_panel=MACHINE_PANEL
    ),
]
Memory: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        help="Cap on buffers, e.g. 4GiB.  [default: 4GiB, or half of the RAM if less]",
        rich_help_panel=MACHINE_PANEL,
    ),
]
Connections: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--connections",
        metavar="N",
        help="Requests for remote files at once.  [default: 32]",
        rich_help_panel=MACHINE_PANEL,
    ),
]
Executor: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--executor",
        metavar="NAME",
        autocompletion=choices("threads", "ray"),
        help="Who makes OUT's files: threads of this process, or ray, tasks on a cluster.  [default: threads]",
        rich_help_panel=PARTS_PANEL,
    ),
]
Address: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="The Ray cluster.  [default: the one that runs here, else one on this machine alone]",
        rich_help_panel=PARTS_PANEL,
    ),
]
Seed: TypeAlias = Annotated[
    int, typer.Option("--seed", metavar="N", help="Seed of the random operators, and of --select sample and random.")
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
    bool, typer.Option("--strict", help="Refuse a recipe with a notice, and a plan that reads nothing of an expert.")
]
Lenient: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--lenient",
        help="Take misspelt names for such without effect, and shares like 40 as 1, as mergekit does.",
    ),
]
Force: TypeAlias = Annotated[bool, typer.Option("--force", help="Replace OUT, if mergepipe made it.")]
Resume: TypeAlias = Annotated[
    bool | None,
    typer.Option(
        "--resume/--no-resume",
        help="Resume an interrupted run of the same merge to OUT, if it must beyond the budget, on record."
        "  [default: if there is one, within the budget]",
        show_default=False,
        rich_help_panel=WORK_PANEL,
    ),
]
Quiet: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        help="No progress, no report: errors, and warnings that the result is not what the recipe says.",
        rich_help_panel=PRINT_PANEL,
    ),
]
AsJson: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, and no progress.", rich_help_panel=PRINT_PANEL)
]
Debug: TypeAlias = Annotated[
    bool, typer.Option("--debug", help="On failure, print the traceback too.", rich_help_panel=PRINT_PANEL)
]

Home: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--home",
        metavar="DIR",
        help="Where the catalog is.  [default: $MERGEPIPE_HOME, else the user data folder]",
        rich_help_panel=WORK_PANEL,
    ),
]
NoCatalog: TypeAlias = Annotated[
    bool,
    typer.Option("--no-catalog", help="Use no catalog, and record nothing in it.", rich_help_panel=WORK_PANEL),
]

BUDGET_HELP = "Read at most this from the experts: a share of what reading all would cost (25%, 0.25) or bytes (4GiB)."
EVALUATE_HELP = (
    "Run this command on each merge, without a shell; the last number that it prints is the loss. {} stands for the "
    "merge's folder, which comes last without."
)
Select: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--select",
        metavar="POLICY",
        autocompletion=choices("norm", "sample", "conflict", "random"),
        help="What to read: norm, sample, conflict or random.  [default: norm]",
        rich_help_panel=BUDGET_PANEL,
    ),
]
WhereOmitted: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--where-omitted",
        metavar="RULE",
        autocompletion=choices("keep", "renormalize"),
        help="Where an expert is omitted, keep the weights of the others, or renormalize them (linear).  "
        "[default: keep]",
        rich_help_panel=BUDGET_PANEL,
    ),
]
BlockElements: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--block-elements",
        metavar="N",
        help="Elements of a block, a multiple of 16384.  [default: 262144]",
        rich_help_panel=BUDGET_PANEL,
    ),
]
RequestCost: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--request-cost",
        metavar="SIZE",
        help="Read gaps shorter than this in remote experts too, in place of another request.  [default: 3MB]",
        rich_help_panel=BUDGET_PANEL,
    ),
]
MinDensity: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--min-density",
        metavar="SHARE",
        help="Let densities of TIES and DARE fall to this under a tight budget.  [default: they stay]",
        rich_help_panel=BUDGET_PANEL,
    ),
]
Importance: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--importance",
        metavar="PATH",
        help="With --select sample: draw important tensors more often. A JSON object of numbers by tensor, "
        "safetensors with one number a tensor or an element, or a training checkpoint (second moments).",
        rich_help_panel=BUDGET_PANEL,
    ),
]


Paths = Annotated[
    str,
    typer.Option(
        "--paths",
        metavar="STYLE",
        autocompletion=choices("relative", "absolute"),
        help="How the output's files name local inputs: relative or absolute.",
        rich_help_panel=PUBLISHING_PANEL,
    ),
]
BaseModelId = Annotated[
    list[str] | None,
    typer.Option(
        "--base-model-id",
        metavar="ID",
        help="A base model on the Hub for the model card: org/name, or MODEL=org/name. May be given several times.",
        rich_help_panel=PUBLISHING_PANEL,
        show_default=False,
    ),
]


RECIPE_ENDINGS, PLAN_ENDINGS = (".yml", ".yaml"), (".json",)


def refuse_swapped(first: str, second: str, endings: tuple[str, ...]) -> None:
    """Refuse two arguments of which the second is named as the first should be.

    Raises:
        RecipeError: `option.swapped`.
    """
    if second.endswith(endings) and not first.endswith(endings):
        from mergepipe.errors import RecipeError

        message = f"stands where the output is named, and {first} where a file like it is"
        raise RecipeError.of("option.swapped", second, message, f"swap the two: {second} {first}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintFlags:
    """Options of printing. The guard reads `--debug` before there is a command."""

    as_json: AsJson = False
    debug: Debug = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFlags:
    """Options of printing for commands that run long. The guard reads `--debug` before there is a command."""

    as_json: AsJson = False
    quiet: Quiet = False
    debug: Debug = False

    @property
    def silent(self) -> bool:
        """Whether no progress is shown."""
        return self.quiet or self.as_json


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFlags:
    """Options of spending a budget."""

    select: Select = None
    where_omitted: WhereOmitted = None
    min_density: MinDensity = None
    block_elements: BlockElements = None
    request_cost: RequestCost = None
    importance: Importance = None

    def options(self, *, strict: bool = False, lenient: bool = False) -> PlanOptions:
        """Return these as options of the API, with its defaults for what was not given.

        Raises:
            LimitError, RecipeError: as `PlanOptions`; `option.density`.
        """
        from mergepipe.planning.budget import parse_fraction

        default = PlanOptions()
        density = self.min_density
        return PlanOptions(
            select=self.select or default.select,
            where_omitted=self.where_omitted or default.where_omitted,
            min_density=None if density is None else parse_fraction(density, "--min-density", "option.density"),
            block_elements=self.block_elements,
            request_cost_bytes=optional_size(self.request_cost, "--request-cost"),
            importance=self.importance,
            strict=strict,
            lenient=lenient,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishingFlags:
    """Options of what the output's files say of the inputs."""

    paths: Paths = PathStyle.RELATIVE.value
    base_model_id: BaseModelId = None

    @property
    def base_model_ids(self) -> tuple[str, ...]:
        """The ids that were given."""
        return tuple(self.base_model_id or ())


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFlags:
    """The flags that choose the executor of a merge."""

    executor: Executor = None
    address: Address = None

    @property
    def executor_name(self) -> str:
        """The executor that was given, or the default."""
        return ExecutorName.THREADS.value if self.executor is None else self.executor


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFlags:
    """Options of using the machine, and the place of the catalog."""

    threads: Threads = None
    memory: Memory = None
    home: Home = None
    connections: Connections = None

    @property
    def n_connections(self) -> int:
        """The number of connections that was given, or the default."""
        return CONNECTIONS if self.connections is None else self.connections

    def options(self, *, catalog: bool = True) -> RunOptions:
        """Return these as options of the API.

        Raises:
            LimitError, RecipeError: as `RunOptions`; `option.size`.
        """
        return RunOptions(
            threads=self.threads,
            memory_bytes=optional_size(self.memory, "--memory"),
            home=self.home,
            catalog=catalog,
            connections=self.n_connections,
        )
