"""Lets `python -m mergepipe` be the `mergepipe` command."""

from __future__ import annotations

import sys

from mergepipe.cli import main

sys.exit(main())
