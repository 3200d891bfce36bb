"""Attacks on trainings of two ranks; `studies/reliability/rank_kills.py` carries out more."""

import pytest

from studies.reliability.rank_kills import KINDS, carry_out, storm


@pytest.mark.slow
def test_attacks_leave_nothing_behind_and_the_answer_names_the_rank_that_failed(tmp_path):
    with storm(tmp_path, seed=1) as run:
        found = carry_out(run, attacks=len(KINDS))
    assert found["violations"] == []
