"""The files that a service is deployed with: what they say is what the command takes."""

import re
from pathlib import Path

import yaml

from autotune.cli.defaults import OF_STORAGE
from autotune.cli.serve import ServeCommand
from autotune.client.address import TOKEN_VARIABLE
from autotune.spec.setting import all_options_of
from autotune.storage.error_translation import parse_url

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "deploy"
FLAGS = {option.flag for option in all_options_of(ServeCommand).values()}


def compose():
    return yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]


def test_every_option_of_the_composition_is_one_of_serve():
    given = {word for word in compose()["autotune"]["command"] if word.startswith("--")}
    assert given
    assert given <= FLAGS


def test_every_option_of_the_image_is_one_of_serve():
    entry = (FOLDER / "Dockerfile").read_text().rpartition("ENTRYPOINT ")[2]
    assert set(re.findall(r'"(--[a-z-]+)"', entry)) <= FLAGS


def test_the_image_copies_files_that_there_are():
    copied = re.findall(r"^COPY (.*) \S+$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    assert all((ROOT / name).exists() for line in copied for name in line.split())


def test_the_password_is_in_the_environment_and_in_no_argument():
    services = compose()
    url = services["autotune"]["environment"][OF_STORAGE]
    assert parse_url(url.replace("${POSTGRES_PASSWORD}", "secret")).host in services
    assert TOKEN_VARIABLE in services["autotune"]["environment"]
    assert "PASSWORD" not in str(services["autotune"]["command"])
