"""The files of profiles: which are listed, and where the links of a report lead."""

import dataclasses
import shutil
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import autotune
from autotune.reporting.profile_files import profile_of, profiles_of
from tests.building.profiles import FILES, write_profile_of
from tests.building.studies import measured, write_study


@pytest.fixture
def result(tmp_path):
    """A study with two trials, of which the first has a profile."""
    url = f"sqlite:///{tmp_path}/a folder/autotune.db"
    (tmp_path / "a folder").mkdir()
    write_study(url, [measured(), measured(tokens_per_second=900.0)], name="kept")
    result = autotune.show("kept", storage=url)
    write_profile_of(result, 0)
    return result


def links_of(page):
    """Return the addresses of the links to files in the section of profiles."""
    found = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attributes):
            address = dict(attributes).get("href", "")
            if tag == "a" and not address.startswith(("#", "https:")):
                found.append(address)

    Reader().feed(page.read_text())
    return found


def test_every_file_of_a_profile_is_listed_with_its_size_and_generated_code_is_last(result):
    (profile,) = profiles_of(result)
    assert {file.name: file.size_bytes for file in profile.files if file.name in FILES} == {
        name: len(content) for name, content in FILES.items()
    }
    assert [file.name for file in profile.main_files] == [
        "memory.html",
        "trace.json.gz",
        "snapshot.pickle",
        "profile.json",
    ]
    assert [file.name for file in profile.code_files] == ["code/graph-0.py", "code/graph-1.py"]


def test_a_profile_of_another_configuration_is_none_of_the_trial(result):
    config = dataclasses.replace(result.trial(0).config, checkpointing="block")
    trial = dataclasses.replace(result.trial(0), config=config)
    other = dataclasses.replace(result, trials=(trial, *result.trials[1:]))
    assert profiles_of(other) == ()


def test_a_profile_of_an_earlier_study_of_that_name_is_none_of_the_study(result):
    workload = dataclasses.replace(result.workload, sequence_length=16)
    assert profiles_of(dataclasses.replace(result, workload=workload)) == ()


def test_links_in_the_folder_of_a_profile_are_not_listed(result, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("x")
    (profile_of(result, 0).folder / "more.json").symlink_to(secret)
    assert "more.json" not in [file.name for file in profile_of(result, 0).files]
    assert profile_of(result, 0).file("more.json") is None


def test_a_trial_that_was_not_profiled_has_no_profile(result):
    assert profile_of(result, 1) is None


@pytest.mark.parametrize("page", ["report.html", "a folder/report.html", "deep/er/report.html"])
def test_the_links_of_a_report_lead_to_the_files_from_where_it_is(result, page, tmp_path):
    page = tmp_path / page
    page.parent.mkdir(parents=True, exist_ok=True)
    result.write_report(page)
    found = [page.parent / unquote(address) for address in links_of(page)]
    folder = profile_of(result, 0).folder
    assert {file.resolve() for file in found} == {
        (folder / name).resolve() for name in (*FILES, "profile.json")
    }
    assert all(file.is_file() for file in found)


def test_the_links_work_where_report_and_work_folder_are_moved_together(result, tmp_path):
    page = result.write_report(tmp_path / "a folder" / "report.html")
    moved = tmp_path / "moved"
    shutil.move(page.parent, moved)
    assert all((moved / unquote(address)).is_file() for address in links_of(moved / page.name))


def test_a_report_of_a_study_without_profiles_does_not_speak_of_them(result, tmp_path):
    shutil.rmtree(profile_of(result, 0).folder)
    page = result.write_report(tmp_path / "report.html")
    assert 'id="profiles"' not in Path(page).read_text()
