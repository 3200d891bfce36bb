"""Where a study's trials run on this machine."""

from autotune.executors.local import LocalExecutor


def test_torch_compile_works_from_a_folder_with_a_space_in_its_name(tmp_path):
    folder = tmp_path / "my studies"
    with LocalExecutor(folder) as executor:
        _, unavailable = executor.probe("cpu", {"compile": ["block"]})
    assert unavailable == {}
