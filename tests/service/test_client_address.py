"""Where a server is and which token it gets: the URL, the environment, a file of the user's own."""

import pytest

from autotune.client.address import server_address, token_for, tokens_file
from autotune.errors import InvalidInput

SERVER = "https://tuning.example.org"


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    """The file of tokens, which is not there yet; the environment has none."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("AUTOTUNE_TOKEN", raising=False)
    monkeypatch.delenv("AUTOTUNE_SERVER", raising=False)
    (tmp_path / "autotune").mkdir()
    return tokens_file()


def write(file, text, mode=0o600):
    file.write_text(text)
    file.chmod(mode)


@pytest.mark.parametrize(
    ("given", "url", "token"),
    [
        ("http://127.0.0.1:8321", "http://127.0.0.1:8321", None),
        ("http://127.0.0.1:8321/?token=abc-_1", "http://127.0.0.1:8321", "abc-_1"),
        ("HTTPS://Tuning.Example.org:443/", SERVER, None),
        ("http://host:80/team/?token=x", "http://host/team", "x"),
        ("http://[::1]:8321/", "http://[::1]:8321", None),
    ],
)
def test_a_url_is_taken_as_it_is_printed_or_typed(given, url, token):
    address = server_address(given)
    assert (address.url, address.token) == (url, token)
    assert token is None or token not in repr(address)


@pytest.mark.parametrize(
    "given",
    [
        "",
        "host",
        "127.0.0.1:8321",
        "ftp://host",
        "http://",
        "http://host:x",
        "http://host:99999",
        "http://me:secret@host",
        "http://host/?key=secret",
        "http://host/#secret",
        "http://host/?token=",
        "http://host/?token=secret%0d%0aX: y",
        " http://host",
        "http://ho\nst",
    ],
)
def test_other_text_is_rejected_without_showing_a_secret(given):
    with pytest.raises(InvalidInput) as error:
        server_address(given)
    assert error.value.hint
    assert "secret" not in f"{error.value.message}{error.value.hint}"


def test_a_token_of_the_environment_comes_first(file, monkeypatch):
    write(file, f'"{SERVER}" = "of-the-file"')
    monkeypatch.setenv("AUTOTUNE_TOKEN", "of-the-environment")
    assert token_for(SERVER) == "of-the-environment"


def test_the_token_of_the_servers_variable_is_for_that_server_alone(monkeypatch):
    monkeypatch.setenv("AUTOTUNE_SERVER", f"{SERVER}/?token=abc")
    assert (token_for(SERVER), token_for("https://other.example.org")) == ("abc", None)


def test_a_file_has_a_token_for_each_server(file):
    write(file, f'"{SERVER}/" = "one"\n"http://127.0.0.1:8321" = "two"\n')
    assert token_for(SERVER) == "one"
    assert token_for("http://127.0.0.1:8321") == "two"
    assert token_for("https://elsewhere.example.org") is None


def test_without_a_file_there_is_no_token():
    assert token_for(SERVER) is None


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602, 0o660])
def test_a_file_that_others_may_use_is_rejected(file, mode):
    write(file, f'"{SERVER}" = "secret"', mode)
    with pytest.raises(InvalidInput, match="others than its owner may use it") as error:
        token_for(SERVER)
    assert error.value.hint == f"chmod 600 {file}"


@pytest.mark.parametrize(
    "text", ["secret", f'"{SERVER}" = 3', '"secret" = "x"', f'"{SERVER}" = "se cret"']
)
def test_a_file_with_something_else_is_rejected_without_showing_it(file, text):
    write(file, text)
    with pytest.raises(InvalidInput) as error:
        token_for(SERVER)
    assert "se cret" not in f"{error.value.message}{error.value.hint}"


def test_a_token_that_no_header_can_carry_is_rejected(monkeypatch):
    monkeypatch.setenv("AUTOTUNE_TOKEN", "sécret\r\nX: y")
    with pytest.raises(InvalidInput, match="AUTOTUNE_TOKEN cannot be one") as error:
        token_for(SERVER)
    assert "cret" not in f"{error.value.message}{error.value.hint}".replace("secret", "")
