"""What holds for the importer of every trainer."""

from pathlib import Path

import pytest

from autotune.errors import InvalidInput
from autotune.importers.keys_of_file import KeysOfFile
from autotune.importers.registry import TRAINERS, import_file
from autotune.spec.config import LegalityContext, TrainingConfig, rule_violations
from autotune.spec.workload import Workload
from tests.importers.examples import OPTIONS, SMALLEST, contents, written

HOSTILE_VALUES = (
    *({"a": 1}, {}, [], [[1]], [None], [{}], [{"path": 1}], "x", "", "nan", "inf", "-1", "1e400"),
    *(-1, 0, 1.5, 10**400, True, False, float("nan"), "a\x00b", "ключ", "zero3" * 1000),
)


def _read(trainer, content, **options):
    found = TRAINERS[trainer]
    keys = KeysOfFile(
        content,
        found.table,
        file=Path("file"),
        options={**OPTIONS.get(trainer, {}), **options},
    )
    return found.read(keys), keys


def _with(content, key, value):
    """Returns a copy of tables within tables in which a key such as `trainer.devices` differs."""
    first, _, rest = key.partition(".")
    if not rest:
        return {**content, key: value}
    inner = content.get(first)
    return {**content, first: _with(inner if isinstance(inner, dict) else {}, rest, value)}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_file_is_found_to_be_of_its_trainer(trainer, tmp_path):
    for content in contents(trainer):
        found = import_file(written(trainer, content, tmp_path), OPTIONS.get(trainer))
        assert found.trainer == TRAINERS[trainer].table.title


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_file_becomes_settings_of_a_workload_and_a_legal_configuration(trainer):
    for content in contents(trainer):
        found, _ = _read(trainer, content, devices_per_trial=8)
        assert set(found.workload) <= set(Workload.__dataclass_fields__)
        config = TrainingConfig(**found.config)
        at = LegalityContext(
            global_batch=found.workload["global_batch"],
            clips_gradients="gradient_clipping" in found.workload,
            devices=found.workload["devices_per_trial"],
            own=config,
        )
        assert rule_violations(config.to_dict(), at) == []


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_key_that_is_taken_over_is_asked_for(trainer):
    asked = set()
    for content in contents(trainer):
        asked |= _read(trainer, content)[1].asked
    assert set(TRAINERS[trainer].table.defaults) - asked == set()


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_key_of_a_file_is_in_one_account(trainer):
    for content in contents(trainer):
        found, keys = _read(trainer, content)
        accounts = [*found.taken, *found.without_effect, *(one.key for one in found.not_taken)]
        assert len(accounts) == len(set(accounts))
        assert {key for key in content if key not in keys.table.sections} <= set(accounts)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_reason_is_the_second_half_of_a_sentence(trainer):
    for content in contents(trainer):
        for one in _read(trainer, content)[0].not_taken:
            assert one.why[0].islower() or one.why.startswith("DeepSpeed")
            assert not one.why.endswith(".")


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_key_that_the_trainer_lacks_is_one_sentence_with_the_near_one(trainer):
    for key in TRAINERS[trainer].table.defaults:
        misspelled = f"{key}s_"
        with pytest.raises(InvalidInput, match=misspelled) as error:
            _read(trainer, _with(SMALLEST[trainer], misspelled, 1))
        assert "did you mean" in str(error.value.hint) or "is not part of" in str(error.value.hint)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_key_without_a_value_has_the_default(trainer):
    expected = _read(trainer, SMALLEST[trainer])[0]
    table = TRAINERS[trainer].table
    smallest = KeysOfFile(SMALLEST[trainer], table, file=Path("file"))
    for key in sorted(table.keys):
        if table.renamed.get(key, key) in {*smallest.taken(), *smallest.without_effect()}:
            continue
        found = _read(trainer, _with(SMALLEST[trainer], key, None))[0]
        assert (found.workload, found.config) == (expected.workload, expected.config), key
        assert found.not_taken == expected.not_taken, key


def _check_values(trainer, content):
    for key in TRAINERS[trainer].table.defaults:
        for value in HOSTILE_VALUES:
            try:
                found, _ = _read(trainer, _with(content, key, value))
            except InvalidInput as error:
                assert error.hint  # noqa: PT017
                assert len(str(error)) < 500, key  # noqa: PT017
            else:
                assert all(len(line) < 500 for line in found.lines())


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_value_of_another_type_is_read_or_one_sentence(trainer):
    _check_values(trainer, contents(trainer)[1])


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_value_of_another_type_is_read_or_one_sentence_in_every_file(trainer):
    for content in contents(trainer):
        _check_values(trainer, content)


def test_a_configuration_of_a_trial_is_the_same_for_any_order_of_the_keys():
    content = contents("trl")[1]
    backwards = dict(reversed(content.items()))
    assert _read("trl", content)[0].config == _read("trl", backwards)[0].config
