"""Run `python -m mergepipe` as the `mergepipe` command."""

from __future__ import annotations

import sys

from mergepipe.cli import main

if __name__ == "__main__":
    sys.exit(main())
