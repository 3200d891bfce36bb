"""Which trials can be profiled."""

import dataclasses

import pytest

from autotune.errors import InvalidInput
from autotune.spec.workload import make_workload
from autotune.study.profilable import check_can_be_profiled
from tests.building.results import record


def test_a_trial_on_several_nodes_is_one_sentence_with_how_to_have_it_on_one():
    workload = make_workload("cpu")
    on_nodes = dataclasses.replace(workload, devices_per_trial=8, nodes_per_trial=2, global_batch=8)
    with pytest.raises(InvalidInput, match="ran on 2 nodes together") as error:
        check_can_be_profiled(record(0), study="kept", workload=on_nodes)
    assert "--devices-per-trial 4 --nodes-per-trial 1" in error.value.hint
