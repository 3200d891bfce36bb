"""Comparison of several studies: results, differences, and what must not be compared."""

import dataclasses
import json

import pytest

from autotune.errors import InvalidInput
from autotune.reporting.figures.comparison import INCOMPARABLE, compute, draw
from autotune.spec.result import Pick
from autotune.spec.workload import make_workload
from tests.building.results import MIB, record, shared_with, study_result
from tests.building.views import BASELINE, BLOCK, HOSTILE, study_view


def view(study, *, speed=1000.0, baseline=400, workload=None, **changes):
    trials = [
        record(0, memory=baseline * MIB, outcome="over_cap", config=BASELINE),
        record(1, memory=100 * MIB, speed=speed, config=BLOCK, tokens_per_second_spread=50.0),
    ]
    settings = {
        "front": (1,),
        "pick": Pick(number=1, criterion="the fastest"),
        "baseline": 0,
        **changes,
    }
    made = {} if workload is None else {"workload": make_workload("cpu", workload)}
    return study_view(study_result(trials, study=study, **settings), **made)


def test_each_study_has_its_pick_and_what_it_saves():
    one, other = compute([view("one"), view("other", speed=2000.0, baseline=200)]).sides
    assert (one.pick, one.peak_memory_bytes, one.tokens_per_second, one.saved_share) == (
        1,
        100 * MIB,
        1000.0,
        0.75,
    )
    assert (other.tokens_per_second, other.saved_share) == (2000.0, 0.5)


def test_equal_settings_are_no_difference():
    assert compute([view("one"), view("other")]).differences == ()


def test_different_caps_and_devices_are_reported():
    compared = compute([view("one"), view("other", cap_bytes=512 * MIB, device="cuda:0")])
    assert "Different cap: 256.0 MiB / 512.0 MiB." in compared.differences
    assert "Different device: cpu (a processor) / cuda (a processor)." in compared.differences


def test_different_workloads_are_reported_as_incomparable():
    compared = compute([view("one"), view("other", workload={"layers": 3})])
    (sentence,) = compared.differences
    assert INCOMPARABLE in sentence
    assert "layers 6 / 3" in sentence
    assert compared.workloads_differ


def test_of_settings_that_are_tables_only_what_differs_is_reported():
    compared = compute([view("one"), view("other", workload={"learning_rates": {"sgd": 0.5}})])
    assert compared.differences == (
        f"The workloads differ, so {INCOMPARABLE}: learning rates sgd 0.1 / 0.5.",
    )


def test_what_one_workload_has_not_is_none():
    compared = compute(
        [view("one"), view("other", workload={"gradient_clipping": 1.0, "text_sha256": "a" * 64})]
    )
    (sentence,) = compared.differences
    assert "text none / aaaaaaaaaaaa…, gradient clipping none / 1.0" in sentence


def test_files_and_packages_that_differ_are_named_and_late_ones_only_where_all_have_them():
    code = {"script_files": {"my_layers.py": "a"}, "packages": {"kernels": "1.0"}}
    late = {"text.txt": "a", "late.py": "a"}
    one = view("one", workload={**code, "script_files_after_apply": late})
    same = view("same", workload={**code, "script_files_after_apply": {"text.txt": "a"}})
    assert compute([one, same]).differences == ()
    other = view(
        "other",
        workload={
            "script_files": {"my_layers.py": "b", "more.py": "b"},
            "packages": {"kernels": "1.1"},
            "script_files_after_apply": {"text.txt": "b"},
        },
    )
    assert compute([one, other]).differences == (
        f"The workloads differ, so {INCOMPARABLE}: packages kernels 1.0 / 1.1, "
        "file my_layers.py a / b, file text.txt a / b, file more.py none / b.",
    )


def test_versions_that_both_studies_know_and_that_differ_are_reported():
    views = []
    for name, versions in (("one", {"peft": "1.0", "new": "1"}), ("other", {"peft": "2.0"})):
        one = view(name)
        device = dataclasses.replace(one.result.device, versions=versions)
        result = dataclasses.replace(one.result, device=device)
        views.append(dataclasses.replace(one, result=result))
    assert compute(views).differences == ("Different peft: 1.0 / 2.0.",)


def test_a_perplexity_of_another_trial_is_marked():
    trials = [
        record(0, config=BASELINE),
        record(1, config=BLOCK, perplexity_source=shared_with(0)),
    ]
    found = {"front": (1,), "pick": Pick(number=1, criterion="the fastest"), "baseline": 0}
    side = compute([study_view(study_result(trials, study="one", **found)), view("other")]).sides[0]
    assert side.perplexity_words == "=10.00"


def test_a_study_without_a_pick_has_none():
    side = compute([view("one"), view("other", front=(), pick=None)]).sides[1]
    assert (side.pick, side.peak_memory_bytes, side.saved_share) == (None, None, None)


@pytest.mark.parametrize(
    ("names", "message"),
    [(["one"], "one alone cannot be compared"), (["one", "one"], "cannot be compared with itself")],
)
def test_one_study_is_no_comparison(names, message):
    with pytest.raises(InvalidInput, match=message):
        compute([view(name) for name in names])


def test_a_side_is_json():
    assert json.loads(json.dumps(compute([view("one"), view("other")]).sides[0].to_dict()))[
        "front"
    ] == [1]


def traces(*views, name):
    return [trace for trace in draw(compute(views)).data if trace.name.startswith(name)]


def test_each_front_has_its_own_shape_colour_and_dash():
    views = view("one"), view("other")
    one, other = (traces(*views, name=name)[0].marker for name in ("one", "other"))
    assert one.symbol != other.symbol
    assert one.color != other.color
    assert len({line.line.dash for line in traces(*views, name="line of")}) == 2


def test_a_line_goes_through_what_is_fastest_so_far():
    trials = [
        record(number, memory=(number + 1) * 10 * MIB, speed=speed, perplexity=20.0 - number)
        for number, speed in enumerate([1000.0, 800.0, 1500.0])
    ]
    both = [
        study_view(study_result(trials, study=name, front=(0, 1, 2))) for name in ("one", "other")
    ]
    line = traces(*both, name="line of one")[0]
    assert (line.x, line.y) == ((10.0, 20.0, 30.0), (1000.0, 1000.0, 1500.0))


def test_each_pick_is_a_star_where_it_was_measured():
    stars = traces(view("one"), view("other", speed=2000.0), name="pick of")
    assert [(star.x, star.y) for star in stars] == [((100.0,), (1000.0,)), ((100.0,), (2000.0,))]


@pytest.mark.parametrize(("cap_bytes", "lines"), [(256 * MIB, 1), (512 * MIB, 2)])
def test_one_cap_is_one_line_and_two_are_two(cap_bytes, lines):
    assert (
        len(draw(compute([view("one"), view("other", cap_bytes=cap_bytes)])).layout.shapes) == lines
    )


def test_hostile_names_are_no_markup():
    drawn = draw(compute([view("one"), view(HOSTILE)])).to_plotly_json()
    drawn["layout"].pop("meta")
    assert "<script" not in json.dumps(drawn, default=str)
