"""Available memory of the host, read from handwritten files in the kernel's format."""

import pytest

from autotune.memory.host import available_bytes

GIB = 2**30


@pytest.fixture
def host(tmp_path):
    """host(cgroup, {file: text}) returns what a process of that group has left of 8 GiB."""

    def write(cgroup, files):
        proc, groups = tmp_path / "proc", tmp_path / "cgroup"
        (proc / "self").mkdir(parents=True)
        (proc / "meminfo").write_text(
            f"MemTotal: 99999999 kB\nMemAvailable:   {8 * GIB // 1024} kB\n"
        )
        (proc / "self" / "cgroup").write_text(cgroup)
        for name, text in files.items():
            (groups / name).parent.mkdir(parents=True, exist_ok=True)
            (groups / name).write_text(text)
        return available_bytes(proc=proc, groups=groups)

    return write


def test_without_a_limit_it_is_what_the_machine_has_available(host):
    assert (
        host("0::/one\n", {"one/memory.max": "max\n", "one/memory.current": f"{GIB}\n"}) == 8 * GIB
    )


def test_cached_files_in_a_group_count_as_free(host):
    files = {"memory.max": f"{4 * GIB}\n", "memory.current": f"{3 * GIB}\n", "memory.stat": ""}
    files["memory.stat"] = f"anon {GIB}\ninactive_file {GIB // 2}\nactive_file {GIB // 2}\n"
    assert host("0::/one\n", {f"one/{name}": text for name, text in files.items()}) == 2 * GIB


def test_the_limit_of_a_parent_group_counts_as_well(host):
    files = {
        "memory.max": "max\n",
        "memory.current": "0\n",
        "../memory.max": f"{GIB}\n",
        "../memory.current": "5\n",
    }
    assert (
        host("0::/pod/one\n", {f"pod/one/{name}": text for name, text in files.items()}) == GIB - 5
    )


def test_in_a_container_the_top_group_is_that_of_the_process(host):
    assert host("0::/\n", {"memory.max": f"{GIB}\n", "memory.current": "0\n"}) == GIB


def test_version_1_of_control_groups_is_read_and_its_number_for_no_limit_is_ignored(host):
    group = "5:cpu:/one\n4:memory:/one\n0::/\n"
    files = {
        "limit_in_bytes": f"{2 * GIB}\n",
        "usage_in_bytes": f"{GIB}\n",
        "stat": f"total_inactive_file {GIB}\n",
    }
    limited = {f"memory/one/memory.{name}": text for name, text in files.items()}
    top = {
        "memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
        "memory/memory.usage_in_bytes": "0\n",
    }
    assert host(group, limited | top) == 2 * GIB


def test_a_machine_without_these_files_has_no_known_limit(tmp_path):
    assert available_bytes(proc=tmp_path, groups=tmp_path) is None
