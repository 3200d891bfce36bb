"""Every picture of the study `tour`: its figures, its report in a browser and on paper.

    python studies/report/pictures.py --storage sqlite:///tour.db --out pictures

Needs autotune's extra `images`, playwright, pdftoppm and a Chromium (`CHROMIUM` says where it is,
else /usr/bin/chromium).
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import sync_playwright

from autotune.reporting.figures import FIGURES

SIZES = {"phone": (375, 812), "laptop": (1366, 768), "desktop": (1920, 1080)}
STUDY = "tour"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--storage", default="sqlite:///tour.db")
    parser.add_argument("--out", type=Path, default=Path("pictures"), help="folder to write to")
    arguments = parser.parse_args()
    storage, out = arguments.storage, arguments.out
    out.mkdir(parents=True, exist_ok=True)
    for kind in FIGURES:
        run(
            "plot",
            STUDY,
            kind,
            "--out",
            out / f"{kind}.png",
            "--width",
            1200,
            "--storage",
            storage,
        )
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.html"
        run("report", STUDY, "--out", report, "--storage", storage)
        screenshots(report, out)
        print_first_page(report, out, Path(folder))


def run(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "autotune", *map(str, arguments)], check=True)


def screenshots(report: Path, out: Path) -> None:
    """Takes the first screenfuls at each size; the phone's in dark."""
    with sync_playwright() as playwright:
        chromium = os.environ.get("CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (width, height) in SIZES.items():
            scheme = "dark" if name == "phone" else "light"
            page = browser.new_page(
                viewport={"width": width, "height": 3 * height}, color_scheme=scheme
            )
            page.goto(report.as_uri())
            page.wait_for_timeout(6000)  # figures are drawn as they come into view
            page.screenshot(path=out / f"report-{name}.png")
            page.close()
        browser.close()


def print_first_page(report: Path, out: Path, folder: Path) -> None:
    """Draws the report's first page on A4, as it is saved from a dark screen."""
    file = folder / "report.pdf"
    with sync_playwright() as playwright:
        chromium = os.environ.get("CHROMIUM", "/usr/bin/chromium")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(color_scheme="dark")
        page.goto(report.as_uri())
        page.wait_for_timeout(3000)
        page.pdf(path=file, format="A4", prefer_css_page_size=True)
        browser.close()
    command = ["pdftoppm", "-png", "-r", "60", "-f", "1", "-l", "1", "-singlefile"]
    subprocess.run([*command, file, out / "report-paper"], check=True)


if __name__ == "__main__":
    main()
