"""The page of all studies: what each asks, and the versions that its numbers belong to."""

import re
from pathlib import Path

STUDIES = Path(__file__).parents[1] / "studies"
ROWS = re.findall(
    r"^\| \[(\w+)\]\(\w+/README\.md\) \| .+ \| (.+) \| (.+) \|$",
    (STUDIES / "README.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


def test_the_page_lists_every_study_once():
    folders = sorted(page.parent.name for page in STUDIES.glob("*/README.md"))
    assert sorted(name for name, _, _ in ROWS) == folders


def test_every_study_says_with_which_torch_and_when_it_was_run():
    for name, torch, days in ROWS:
        page = (STUDIES / name / "README.md").read_text(encoding="utf-8")
        for day in re.findall(r"\d{4}-\d\d-\d\d", days):
            assert day in page, name
        for version in re.findall(r"\d+\.\d+", torch.replace(".0", "")):
            assert re.search(rf"[Tt]orch\s+{re.escape(version)}|{re.escape(version)}\.0", page), (
                name
            )
