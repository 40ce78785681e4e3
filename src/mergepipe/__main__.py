"""Run `python -m mergepipe` as the `mergepipe` command."""

from __future__ import annotations

import sys

from mergepipe.cli import main

sys.exit(main())
