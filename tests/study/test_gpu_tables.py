"""The table of a GPU, and a search replayed on it in virtual time."""

from dataclasses import replace

import numpy
import pytest

from autotune.spec.config import TrainingConfig
from studies.search_efficiency.gpu.assumptions import Assumptions, Card
from studies.search_efficiency.gpu.device_table import GIB, DeviceTable
from studies.search_efficiency.gpu_tables import Run, TableName, search, table_of

H200 = TableName(gpu="h200")
PLAIN = TrainingConfig(micro_batch_size=16)
MEASURED_ALONE = {
    PLAIN: 52_972,
    replace(PLAIN, checkpointing="block", optimizer_fusion="kernel"): 42_044,
    replace(PLAIN, checkpointing="block", optimizer_fusion="backward"): 41_765,
}
"""Tokens per second on an H200 (`studies/gpu/h200/first-search.json.xz`)."""


@pytest.mark.slow
def test_the_table_has_the_speeds_that_were_measured_alone_within_about_5_percent():
    table = table_of(H200)
    for config, measured in MEASURED_ALONE.items():
        assert table.objectives(config)[1] == pytest.approx(measured, rel=0.055)


def test_configurations_of_one_program_have_one_plan():
    table = table_of(H200)
    compiled = TrainingConfig(compile="block", precision="bf16-mixed", micro_batch_size=16)
    updated = replace(compiled, optimizer_fusion="kernel")
    assert table.prediction(compiled).plan == table.prediction(updated).plan is not None
    assert table.prediction(replace(compiled, precision="fp32")).plan != (
        table.prediction(compiled).plan
    )


def test_redrawn_assumptions_are_others_and_the_same_for_the_same_seed():
    assert Assumptions().redrawn(1) == Assumptions().redrawn(1) != Assumptions().redrawn(2)
    drawn, assumed = Assumptions().redrawn(3), Assumptions()
    for kind, share in assumed.linear_efficiency.items():
        assert 0.7 <= drawn.linear_efficiency[kind] / share <= 1.3
    assert 0.5 <= drawn.host_time <= 2.0


@pytest.mark.slow
def test_a_search_of_a_minute_has_most_of_what_a_gpu_can_do_under_the_cap():
    run = Run(table_of(H200), cap_bytes=8 * GIB, seed=0, until=60.0)
    search(run)
    speed, hypervolume, pick = run.shares(60.0)
    assert speed >= 0.85
    assert hypervolume >= 0.45
    assert pick >= 0.85


@pytest.mark.slow
@pytest.mark.parametrize("cap", [4, 8, 16])
def test_a_search_of_ten_minutes_reaches_the_optimum(cap):
    run = Run(table_of(H200), cap_bytes=cap * GIB, seed=0, until=600.0)
    search(run)
    after_3_minutes, at_the_end = run.shares(180.0), run.shares(600.0)
    assert min(after_3_minutes[0], after_3_minutes[2]) >= 0.9
    assert after_3_minutes[1] >= 0.65
    assert min(at_the_end[0], at_the_end[2]) >= 0.93
    assert at_the_end[1] >= 0.85


@pytest.mark.slow
@pytest.mark.parametrize("card", ["a100", "l4", "rtx4090"])
def test_every_card_has_a_table(card):
    table = DeviceTable(Card.read(card), Assumptions())
    assert numpy.isfinite(table.speed).all()
    assert numpy.isfinite(table.peak_bytes).all()
    best = table.optimum(8 * GIB)
    assert best.precision not in ("fp32", "tf32")


@pytest.mark.slow
def test_where_16_bit_and_compiling_bring_nothing_no_configuration_is_much_faster():
    table = table_of(TableName(gpu="h200", gains=False))
    assert table.speed.max() / table.baseline_speed < 1.3
    assert table_of(H200).speed.max() / table_of(H200).baseline_speed > 8
