"""Draws what a command prints in a terminal, as an SVG.

    python studies/report/terminal.py --out docs/show.svg -- autotune show my-study

The command runs with its colours and the width of the picture; nothing of its text is changed.
"""

import argparse
import io
import os
import subprocess
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 80


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--columns", type=int, default=COLUMNS)
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    environment = {**os.environ, "COLUMNS": str(arguments.columns), "FORCE_COLOR": "1"}
    printed = subprocess.run(
        arguments.command, env=environment, capture_output=True, text=True, check=True
    ).stdout
    console = Console(record=True, width=arguments.columns, file=io.StringIO())
    console.print(Text.from_ansi(f"$ {' '.join(arguments.command)}\n{printed}"), soft_wrap=True)
    title = " ".join(arguments.command)
    arguments.out.write_text(console.export_svg(title=title), encoding="utf-8")


if __name__ == "__main__":
    main()
