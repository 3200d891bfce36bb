"""Answers a question without torch, once it has checked what was asked: `python -m` runs it.

What was asked is in the answer, so that a page shows it.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from autotune.errors import AutotuneError, InvalidInput
from autotune.service.settings import SubmissionRules
from autotune.service.submissions import check_submission, checked_workload


def planned(settings):
    """Returns what a dry run answers, with the settings as its texts."""
    asked = json.dumps(settings)
    first = {"name": asked, "label": asked, "config": {}, "is_baseline": True}
    return {
        "space": asked,
        "workload": asked,
        "device": {"name": asked, "device": "cpu"},
        "cap_bytes": 2**26,
        "configurations": 144,
        "values": {"precision": ["fp32", asked]},
        "excluded": [asked],
        "trials_wanted": 2,
        "ends_by_time": False,
        "trials_at_once": 1,
        "reused": {asked: 1},
        "first": [{**first, "predicted_peak_memory_bytes": 2**27, "is_over_cap": True}],
        "reused_baseline_bytes": None,
        "seconds": None,
        "seconds_for_trials": None,
        "default_time_budget_seconds": 600.0,
        "confirm_share": 0.2,
        "variants_share": 0.15,
    }


def main():
    question, order = json.load(sys.stdin)
    if question == "timeline":
        print(json.dumps({"answer": {"data": [], "layout": {}}}))
        return
    rules = SubmissionRules.of(order["rules"])
    try:
        if question == "dry-run":
            with TemporaryDirectory() as folder:
                check_submission(order["settings"], rules, folder=Path(folder))
        else:
            checked_workload(order["settings"].get("workload", {}), rules)
        answer = {"answer": planned(order["settings"])}
    except AutotuneError as error:
        kind = "InvalidInput" if isinstance(error, InvalidInput) else "PreparationFailed"
        answer = {"error": error.message, "hint": error.hint, "kind": kind}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
