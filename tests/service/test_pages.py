"""The pages as texts and values: what they show, without a browser."""

import json
import re
from dataclasses import replace

import httpx
import pytest

from autotune.analysis.pick import Preferences
from autotune.errors import InvalidInput
from autotune.service.pages import assets, contexts, form
from autotune.service.pages.field_names import FIELDS
from autotune.service.pages.paged_trials import PAGE_SIZE, TrialAddress, paged_trials
from autotune.service.pages.plan import Bar, plan_text
from autotune.service.submissions import ACCEPTED
from autotune.spec.config import TrainingConfig
from autotune.spec.confirmation import InitialPerplexity, new_confirmation_id
from autotune.spec.setting import all_options_of
from autotune.storage.store import StudySummary
from autotune.study.submission import Submission
from tests.building.page_server import RUNNING, TOKEN, page_server
from tests.building.reports import hostile_view, large_view, plain_view, report_of
from tests.building.results import MIB
from tests.building.studies import open_store
from tests.building.views import failures_only, ladder_view, many_trials

# -- the form of a new search ----------------------------------------------------------------------


def test_every_setting_that_a_submission_may_have_and_that_is_an_option_has_a_field():
    declared = {name for name, option in all_options_of(Submission).items() if option.is_typed}
    assert declared & set(ACCEPTED) <= set(FIELDS)


def test_the_form_has_no_field_that_a_submission_cannot_have():
    assert set(FIELDS) <= set(ACCEPTED)


def test_every_field_is_on_the_form_once():
    shown = form.filled({}).form
    fields = [field.keyword for field in shown.first]
    fields += [field.keyword for group in shown.groups for field in group.fields]
    assert sorted(fields) == sorted(FIELDS)


def test_a_filled_form_is_a_submission():
    given = {
        "max_mem": "48MiB",
        "trials": "8",
        "time_budget": "2m",
        "layers": "4",
        "learning_rates": "adamw=3e-4\nsgd=0.1",
        "predict": "true",
        "full_trainings": "true",
        "streaming": "false",
        "priority": "-5",
        "dataset": "",
    }
    filled = form.filled(given)
    assert filled.is_valid
    assert filled.body == {
        "max_mem": "48MiB",
        "trials": 8,
        "time_budget": "2m",
        "layers": 4,
        "learning_rates": {"adamw": 3e-4, "sgd": 0.1},
        "predict": False,  # the field is called "No predict"
        "full_trainings": True,
        "streaming": False,
        "priority": -5,
    }


@pytest.mark.parametrize(
    ("keyword", "typed"),
    [
        ("max_mem", "5"),
        ("max_mem", "8,5GiB"),
        ("trials", "many"),
        ("trials", "0"),
        ("time_budget", "soon"),
        ("layers", "-1"),
        ("name", "../etc"),
        ("seed", "-4"),
        ("priority", "101"),
        ("confirm_share", "2"),
        ("learning_rates", "adamw"),
        ("max_perplexity_increase", "-1"),
        ("sampler", "best"),
    ],
)
def test_an_error_stands_next_to_its_field_and_what_was_typed_is_kept(keyword, typed):
    filled = form.filled({keyword: typed, "width": "64"})
    (wrong,) = filled.form.wrong
    assert (wrong.keyword, wrong.value) == (keyword, typed)
    assert wrong.error.endswith(".")
    assert wrong.hint
    assert filled.body == {"width": 64}


def test_an_error_of_the_whole_stands_next_to_the_field_that_it_names():
    given = {"heads": "3", "width": "64"}
    error = InvalidInput("width 64 cannot be divided by 3 heads", hint="use 4 heads")
    (wrong,) = form.with_error(given, error).wrong
    assert wrong.keyword in given


def test_a_folded_group_with_an_error_is_open():
    groups = form.filled({"seed": "x"}).form.groups
    assert [group.title for group in groups if group.is_open] == ["The search"]


def test_help_names_fields_and_not_flags():
    shown = form.filled({}).form
    fields = [*shown.first, *(field for group in shown.groups for field in group.fields)]
    assert [field.keyword for field in fields if "--" in field.help.replace("---", "")] == [
        "script"
    ]


# -- the dry run -----------------------------------------------------------------------------------


def planned(**changes):
    return {
        "space": "quick",
        "workload": "gpt of 6 layers",
        "device": {"name": "a CPU", "device": "cpu"},
        "cap_bytes": 48 * MIB,
        "configurations": 144,
        "values": {"precision": ["fp32", "bf16-mixed"], "loss": ["full"]},
        "excluded": ["precision tf32: this hardware has no TF32"],
        "trials_wanted": 2,
        "ends_by_time": False,
        "trials_at_once": 1,
        "reused": {},
        "first": [
            {
                "name": "baseline",
                "label": "fp32",
                "config": {},
                "is_baseline": True,
                "predicted_peak_memory_bytes": 96 * MIB,
                "is_over_cap": True,
            }
        ],
        "reused_baseline_bytes": None,
        "seconds": None,
        "seconds_for_trials": None,
        "default_time_budget_seconds": 600.0,
        "confirm_share": 0.2,
        "variants_share": 0.15,
        **changes,
    }


def test_the_baseline_stands_beside_the_cap():
    text = plan_text(planned())
    assert text.baseline == (
        "Plain training, the baseline, needs about 96.00 MiB: 200 % of the cap of 48.00 MiB."
    )
    assert text.bar == Bar(peak=96.0, cap=48.0, is_over=True)


def test_a_baseline_that_is_known_already_stands_beside_the_cap_too():
    text = plan_text(planned(first=[], reused_baseline_bytes=24 * MIB, reused={"earlier": 3}))
    assert text.baseline.startswith("Plain training, the baseline, needs 24.00 MiB: 50 % of")
    assert text.bar == Bar(peak=48.0, cap=96.0, is_over=False)


def test_a_plan_says_what_is_tried_what_is_left_out_and_how_long_it_takes():
    text = plan_text(planned())
    assert dict(text.facts)["time"] == "it ends after 10 m 00 s, as nothing else is set"
    assert dict(text.lists)["Values that are tried"] == ("precision: fp32, bf16-mixed",)
    assert dict(text.lists)["Left out"] == ("precision tf32: this hardware has no TF32",)


def test_a_plan_that_is_not_possible_says_why():
    text = plan_text(InvalidInput("there is no search space 'quik'", hint="did you mean 'quick'?"))
    assert text.error == "There is no search space 'quik'."
    assert text.hint == "Did you mean 'quick'?"


# -- the table of trials ---------------------------------------------------------------------------


def listed(view, address=""):
    pairs = [tuple(pair.split("=", 1)) for pair in address.split("&") if pair]
    return paged_trials(view.result, TrialAddress.of(pairs))


def numbers(found):
    return [row.record.number for row in found.table.rows]


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("", [0, 1, 2, 3]),
        ("sort=-tokens_per_second", [2, 1, 0, 3]),
        ("sort=tokens_per_second", [0, 1, 2, 3]),
        ("sort=peak_memory_bytes", [1, 2, 0, 3]),
        ("show=front", [1, 2]),
        ("show=out_of_memory", [3]),
        ("show=feasible", [1, 2]),
        ("find=bf16", [2]),
        ("find=#1", [1]),
        ("find=baseline needs", [0]),
        ("technique=checkpointing:block", [1]),
        ("technique=checkpointing:block&technique=precision:fp32", [1]),
        ("technique=checkpointing:block&technique=compile:model", []),
    ],
)
def test_trials_are_found_filtered_and_sorted(address, expected):
    assert numbers(listed(plain_view(), address)) == expected


@pytest.mark.parametrize(
    "address",
    ["sort=nothing", "show=<b>", "page=-3", "page=x", "page=99999999999", "technique=a:b"],
)
def test_an_address_that_is_wrong_shows_the_default(address):
    assert numbers(listed(plain_view(), address)) == [0, 1, 2, 3]


@pytest.mark.parametrize("field", ["peak_memory_bytes", "tokens_per_second", "perplexity"])
def test_what_was_not_measured_is_last_in_both_directions(field):
    view = plain_view()
    assert numbers(listed(view, f"sort={field}"))[-1] == 3
    assert numbers(listed(view, f"sort=-{field}"))[-1] == 3


def test_a_heading_turns_the_order_of_the_column_that_the_table_is_sorted_by():
    found = listed(plain_view(), "sort=seconds")
    addresses = {column.key: found.address.sorted_by(column) for column in found.table.columns}
    assert found.address.directions == {"seconds": "ascending"}
    assert addresses["seconds"] == "sort=-seconds"
    assert addresses["number"] == ""


def test_the_perplexity_before_training_is_on_the_first_page_only():
    view = large_view(60)
    known = replace(view, result=replace(view.result, initial_perplexity=9.5))
    assert listed(view).table.rows[0].record is not None
    assert listed(known).table.rows[0].texts["perplexity"] == "9.50"
    assert listed(known, "page=2").table.rows[0].record is not None


def test_a_page_past_the_last_is_the_last():
    found = listed(large_view(60), "page=9")
    assert (found.address.page, found.pages, found.first, found.last) == (3, 3, 51, 60)


def test_a_page_of_ten_thousand_trials_has_a_few_rows_and_its_neighbours():
    found = listed(large_view(), "page=7&sort=-perplexity")
    assert len(found.table.rows) == PAGE_SIZE
    assert (found.total, found.pages) == (10_000, 400)
    assert found.address.text(page=6) == "sort=-perplexity&page=6"


# -- answers, lists --------------------------------------------------------------------------------


def test_a_running_search_says_the_best_so_far_and_the_size_of_its_front():
    search = {"id": 3, "state": "running", "study": "a-study"}
    shown = contexts.running_search(search, ladder_view().result)
    assert shown.answer.startswith("best so far: #3, ")
    assert shown.answer.endswith("3 on the front")
    assert contexts.running_search(search, None).answer == ""


def test_a_study_without_a_pick_says_what_came_closest():
    page = report_of(failures_only())
    assert not page.answer.found
    assert "closest miss" in page.answer.sentence


def test_preferences_that_are_defaults_are_not_in_the_address():
    assert contexts.preference_pairs(Preferences()) == ()
    chosen = Preferences(prefer="smallest", max_perplexity_increase=0.05)
    assert contexts.preference_pairs(chosen) == (
        ("prefer", "smallest"),
        ("max_perplexity_increase", "0.05"),
    )


def test_a_trial_says_everything_that_was_measured():
    page = contexts.trial_page(plain_view().result, 0)
    assert page.outcome == "over the cap"
    assert dict(page.measured)["peak memory"] == "300.0 MiB"
    assert dict(page.memory) == {"optimizer state": "40.00 MiB", "parameters": "20.00 MiB"}


def summaries():
    return [
        StudySummary(name=name, created_at=f"2026-01-0{day} 10:00", trials=trials, trials_wanted=9)
        for day, (name, trials) in enumerate([("Beta", 5), ("alpha", 9), ("gamma", 1)], start=1)
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["gamma", "alpha", "Beta"]),
        ({"sort": "name"}, ["alpha", "Beta", "gamma"]),
        ({"sort": "-trials"}, ["alpha", "Beta", "gamma"]),
        ({"query": "am"}, ["gamma"]),
        ({"sort": "?"}, ["gamma", "alpha", "Beta"]),
        ({"page": 99}, ["gamma", "alpha", "Beta"]),
    ],
)
def test_studies_are_found_and_sorted(given, expected):
    assert [row.name for row in contexts.study_list(summaries(), {}, **given).rows] == expected


def test_a_search_without_any_progress_has_texts():
    row = contexts.search_row({"id": 3, "state": "queued", "request": {"max_mem": 48 * MIB}})
    assert (row.title, row.state_text, row.about) == ("search 3", "waiting", "48.00 MiB")


def test_a_device_that_others_use_says_so():
    row = contexts.device_row(
        {
            "name": "GPU",
            "type": "cuda",
            "machine": "gpu-1",
            "memory_bytes": 80 * MIB,
            "used_bytes": 20 * MIB,
            "utilization_percent": 12.0,
            "others": [{"pid": 7, "user": "root", "bytes": MIB}],
        }
    )
    assert (row.used_percent, row.busy) == (25, "12 % busy")
    assert row.others == ("process 7 of root: 1.00 MiB",)


def test_hostile_words_come_to_no_harm_before_they_are_shown():
    view = hostile_view()
    page = report_of(view)
    assert view.result.trial(0).name in page.answer.headline
    assert len(listed(view).table.rows) == 3


# -- pages of a server -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with page_server(tmp_path_factory.mktemp("server")) as served:
        served.add_trial()
        yield served


@pytest.fixture(scope="module")
def get(server):
    """get("/new") returns the answer to whoever may do everything."""
    with httpx.Client(base_url=server.address, headers={"Accept": "text/html"}) as client:

        def answer(path, *, token=TOKEN):
            return client.get(path, headers={"Authorization": f"Bearer {token}"})

        yield answer


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/new",
        "/searches/1?log=1",
        f"/studies/{RUNNING}",
        f"/studies/{RUNNING}/trials/0",
        "/studies/hostile",
        "/compare?study=other&study=hostile",
    ],
)
def test_a_page_is_html_that_names_no_other_host(path, get):
    answer = get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert "script-src 'self';" in answer.headers["content-security-policy"]
    assert re.findall(r"""(?:src|href|action)=["'](?:\w+:)?//[^"']*""", answer.text) == []
    assert TOKEN not in answer.text


def test_the_page_of_a_study_has_a_row_for_the_perplexity_before_training(server, get):
    assert "before training" not in get("/studies/other").text
    measured = InitialPerplexity(config=TrainingConfig(), perplexity=1234.5, seconds=1.0)
    with open_store(server.url) as store:
        store.add_confirmation("other", measured, confirmation_id=new_confirmation_id())
    rows = re.findall("<tr.*before training.*</tr>", get("/studies/other").text)
    assert len(rows) == 2  # of the front, and of all trials
    assert all("1,234.50" in row for row in rows)
    assert get("/api/v1/studies/other").json()["initial_perplexity"] == 1234.5


@pytest.mark.parametrize(
    "path",
    ["/studies/none", "/studies/other/trials/99", "/searches/99", "/studies/other/parts/files/0/x"],
)
def test_what_there_is_not_is_not_found(path, get):
    assert get(path).status_code == 404


def test_hostile_words_are_escaped(get):
    text = get("/studies/hostile").text + get("/studies/hostile/trials/1").text
    assert "<img" not in text
    assert "<script>" not in text
    assert "&lt;img src=x" in text


def test_who_may_only_read_is_offered_nothing_else(server, get):
    token = server.app.state.service.tokens.add("reader", role="reader")
    for path in ("/", f"/studies/{RUNNING}"):
        assert "data-action" in get(path).text
        assert "data-action" not in get(path, token=token).text


def test_a_part_says_which_address_its_page_has(get):
    answer = get("/studies/other/parts/trials?sort=-perplexity&page=7&prefer=smallest")
    assert answer.headers["hx-replace-url"] == "/studies/other?prefer=smallest&sort=-perplexity"


def test_a_percentage_of_the_form_is_a_share_in_the_address(get):
    answer = get("/studies/other?prefer=smallest&increase=5")
    assert answer.status_code == 303
    location = answer.headers["location"]
    assert location == "/studies/other?prefer=smallest&max_perplexity_increase=0.05"


def test_a_form_that_is_sent_twice_is_one_search_and_a_changed_one_is_another(server):
    def sent(trials):
        answer = httpx.post(
            server.path("/new"),
            data={"key": "of the form", "max_mem": "1GiB", "trials": trials},
            headers={"Authorization": f"Bearer {TOKEN}"},
        )
        assert answer.status_code == 303
        return answer.headers["location"]

    first = sent("8")
    assert sent("8") == first
    assert sent("9") != first


def test_code_in_a_submission_is_said_to_be_not_allowed_next_to_its_field(server):
    answer = httpx.post(
        server.path("/new"),
        data={"model": "evil.py:model", "name": "kept"},
        headers={"Authorization": f"Bearer {TOKEN}"},
    )
    assert answer.status_code == 422
    assert 'value="evil.py:model"' in answer.text
    assert 'value="kept"' in answer.text
    assert 'role="alert"' in answer.text


def test_a_static_file_may_be_kept_for_ever_under_its_version_only(get):
    answer = get(assets.address("page.css"))
    assert answer.status_code == 200
    assert "immutable" in answer.headers["cache-control"]
    assert get("/static/old/page.css").status_code == 404
    assert get(assets.address("../routes.py")).status_code == 404


def test_plotly_is_served_from_its_package(get):
    answer = get(assets.address(assets.PLOTLY))
    assert answer.status_code == 200
    assert answer.headers["content-encoding"] == "gzip"
    assert b"plotly.js v" in answer.content[:200]


# -- files -----------------------------------------------------------------------------------------


def test_no_script_of_ours_writes_html_or_evaluates_text():
    own = [file for name, file in assets.FILES.items() if name.endswith(".js")]
    for file in own:
        if file.name in ("htmx.min.js", assets.PLOTLY):
            continue
        text = file.read_text()
        for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "Function("):
            assert forbidden not in text, file.name


def test_templates_have_no_script_of_their_own_and_name_no_other_host():
    folder = assets.FILES["page.css"].parents[1] / "templates"
    for file in folder.rglob("*.html"):
        text = file.read_text()
        assert "<script>" not in text, file.name
        assert "http://" not in text, file.name
        assert "https://" not in text, file.name
        assert "|safe" not in text.replace(" ", ""), file.name
        assert "onclick" not in text, file.name


def test_htmx_may_not_evaluate_anything():
    folder = assets.FILES["page.css"].parents[1] / "templates"
    text = (folder / "base.html").read_text()
    config = text.partition('name="htmx-config" content=\'')[2].partition("'")[0]
    settings = json.loads(config)
    assert (settings["allowEval"], settings["includeIndicatorStyles"]) == (False, False)


def test_many_trials_are_compared_by_their_techniques():
    view = ladder_view(many_trials())
    names = [name for name, _ in listed(view).techniques]
    assert names == ["precision", "micro batch size", "checkpointing", "loss"]
