"""`mergepipe push`: publish a snapshot on the Hub or in a bucket."""

from __future__ import annotations

from typing import Annotated

import typer

from mergepipe.cli.guard import Session
from mergepipe.cli.options import Home, ReportFlags, SnapshotName
from mergepipe.cli.outcomes import tell_if_published
from mergepipe.cli.printing import print_report
from mergepipe.cli.progress import progress_shown
from mergepipe.cli.registration import add_command

Destination = Annotated[
    str,
    typer.Argument(
        metavar="DEST",
        help="org/name on the Hub (or hf://org/name[@branch][/folder]), s3://bucket/prefix, gs:// or az://.",
    ),
]
Create = Annotated[bool, typer.Option("--create", help="Create the repository on the Hub, unless it is there.")]
Private = Annotated[bool, typer.Option("--private", help="Create it as a private one.")]
Message = Annotated[str | None, typer.Option("--message", metavar="TEXT", help="The message of the commit.")]
EXAMPLES = (
    "mergepipe push merged/ org/name --create",
    "mergepipe push merged/ s3://bucket/merged",
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, push, section="Snapshots", examples=EXAMPLES)


def push(
    context: typer.Context,
    snapshot: SnapshotName,
    destination: Destination,
    *,
    create: Create = False,
    private: Private = False,
    message: Message = None,
    home: Home = None,
    printing: ReportFlags,
) -> None:
    """Publish a snapshot, a packed expert or a composed checkpoint on the Hub or in a bucket.

    It is visible there whole or not at all: one commit, or a manifest that is written last. Paths of this machine are
    left out. After an interruption the same command uploads only what is missing.
    """
    session: Session = context.obj
    from mergepipe import api
    from mergepipe.jobs.push import push_destination

    place = push_destination(destination)
    with tell_if_published(place), progress_shown(session, silent=printing.silent) as on_progress:
        report = api.push(
            snapshot, destination, create=create, private=private, message=message, home=home, on_progress=on_progress
        )
    from mergepipe.cli.render.snapshots import push_table

    print_report(report, push_table, as_json=printing.as_json, quiet=printing.quiet)
