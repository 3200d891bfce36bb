"""What files have devices share out: DeepSpeed's, accelerate's, and keys of the trainers."""

import json

import pytest
import yaml

from autotune.errors import InvalidInput
from autotune.importers import with_trainer_file
from autotune.importers.registry import TRAINERS, import_file, import_files
from autotune.study.prediction.predicted_training import PredictedTraining
from autotune.study.request import SearchRequest
from tests.importers.examples import OPTIONS, SMALLEST, written

ZERO = {
    0: ("ddp", "torch"),
    1: ("zero1", "deepspeed"),
    2: ("zero2", "deepspeed"),
    3: ("zero3", "deepspeed"),
}
OF_TRANSFORMERS = ("axolotl", "trl", "llamafactory", "transformers")
"""Trainers whose keys deepspeed and fsdp are those of transformers."""


def _import(trainer, folder, devices=2, files=(), **keys):
    file = written(trainer, {**SMALLEST[trainer], **keys}, folder)
    options = {**OPTIONS.get(trainer, {}), "devices_per_trial": devices}
    return import_files((file, *files), options)


def _reasons(found):
    return {one.key: one.why for one in found.not_taken}


@pytest.mark.parametrize("trainer", OF_TRANSFORMERS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_stage_of_zero_is_a_sharding_of_deepspeed(trainer, stage, tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    found = _import(trainer, tmp_path, deepspeed="ds.json")
    assert (found.config["sharding"], found.config["engine"]) == ZERO[stage]
    assert found.workload["devices_per_trial"] == 2


def test_a_prediction_has_torch_share_out_what_deepspeed_does(tmp_path):
    file = written("transformers", {**SMALLEST["transformers"], "deepspeed": "z2.json"}, tmp_path)
    settings = {"from_file": str(file), "devices_per_trial": 2}
    told = []
    predicted = with_trainer_file(settings, PredictedTraining, told=told.extend)["own_config"]
    assert (predicted["sharding"], predicted["engine"]) == ("zero2", "torch")
    assert any("instead of DeepSpeed" in line for line in told)
    assert with_trainer_file(settings, SearchRequest)["own_config"]["engine"] == "deepspeed"


@pytest.mark.parametrize(
    ("formats", "is_taken"),
    [
        ({"grad_accum_dtype": "fp32"}, True),
        ({"grad_accum_dtype": "bf16"}, False),
        ({"grad_accum_dtype": "fp32", "buffer_dtype": "bf16"}, False),
    ],
)
def test_sums_of_gradients_in_float32_are_those_of_trials_with_deepspeed(
    formats, is_taken, tmp_path
):
    zero = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "data_types": formats}
    (tmp_path / "ds.json").write_text(json.dumps(zero))
    found = _import("transformers", tmp_path, deepspeed="ds.json")
    assert found.config["precision"] == "bf16-mixed"
    assert any("data_types" in key for key in _reasons(found)) == (not is_taken)


@pytest.mark.parametrize("trainer", OF_TRANSFORMERS)
def test_a_file_of_deepspeed_that_is_not_there_has_the_stage_of_its_name(trainer, tmp_path):
    found = _import(trainer, tmp_path, deepspeed="configs/ds_z2_config.json")
    assert found.config["sharding"] == "zero2"
    assert "by its name" in _reasons(found)["deepspeed"]
    with pytest.raises(InvalidInput, match="is not there"):
        _import(trainer, tmp_path, deepspeed="configs/mine.json")


@pytest.mark.parametrize(
    ("zero", "offload"),
    [
        ({"offload_optimizer": {"device": "cpu"}}, "optimizer"),
        ({"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, "all"),
        ({"offload_optimizer": {"device": "none"}}, "none"),
    ],
)
def test_what_deepspeed_has_on_the_host_is_offloaded(zero, offload, tmp_path):
    content = {"zero_optimization": {"stage": 3, **zero}}
    (tmp_path / "ds.json").write_text(json.dumps(content))
    found = _import("transformers", tmp_path, deepspeed="ds.json", optim="adamw_torch")
    assert found.config["offload"] == offload


def test_an_unknown_key_of_deepspeed_is_one_sentence_with_the_near_one(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stagee": 3}}))
    with pytest.raises(InvalidInput, match=r"ds\.json has 'stagee'") as error:
        _import("transformers", tmp_path, deepspeed="ds.json")
    assert "'stage'" in str(error.value.hint)


@pytest.mark.parametrize("trainer", OF_TRANSFORMERS)
def test_an_unknown_key_of_fsdp_is_one_sentence_with_the_near_one(trainer, tmp_path):
    with pytest.raises(InvalidInput, match="offload_parameters") as error:
        _import(trainer, tmp_path, fsdp=["full_shard"], fsdp_config={"offload_parameters": True})
    assert "offload_params" in str(error.value.hint)


@pytest.mark.parametrize("trainer", OF_TRANSFORMERS)
@pytest.mark.parametrize(
    ("fsdp", "table", "sharding", "offload"),
    [
        (["full_shard", "auto_wrap"], {}, "zero3", "none"),
        (["shard_grad_op"], {}, "zero2", "none"),
        (["full_shard", "offload"], {}, "zero3", "all"),
        (["full_shard"], {"fsdp_offload_params": True}, "zero3", "all"),
        (["full_shard"], {"reshard_after_forward": False}, "zero2", "none"),
        (["full_shard"], {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, "zero2", "none"),
    ],
)
def test_fsdp_is_a_sharding(trainer, fsdp, table, sharding, offload, tmp_path):
    found = _import(trainer, tmp_path, fsdp=fsdp, fsdp_config=table)
    assert (found.config["sharding"], found.config["offload"]) == (sharding, offload)


@pytest.mark.parametrize("trainer", OF_TRANSFORMERS)
def test_one_device_has_nothing_to_share_out_and_the_note_names_the_option(trainer, tmp_path):
    found = _import(trainer, tmp_path, devices=1, fsdp=["full_shard"])
    assert found.config["sharding"] == "none"
    assert "--devices-per-trial" in _reasons(found)["fsdp"]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_several_devices_alone_are_data_parallel_with_a_larger_batch(trainer, tmp_path):
    keys = {"parallelism": {"data_parallel_replicate_degree": 4}} if trainer == "torchtitan" else {}
    one = _import(trainer, tmp_path, devices=1)
    four = _import(trainer, tmp_path, devices=4, **keys)
    assert four.config["sharding"] == "ddp"
    assert four.workload["global_batch"] == 4 * one.workload["global_batch"]
    assert four.config["micro_batch_size"] == one.config["micro_batch_size"]


@pytest.mark.parametrize("trainer", OF_TRANSFORMERS)
def test_the_file_of_accelerate_beside_says_devices_and_sharding(trainer, tmp_path):
    launcher = tmp_path / "accelerate.yaml"
    content = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_sharding_strategy": "FULL_SHARD", "fsdp_offload_params": False},
        "mixed_precision": "bf16",
        "num_processes": 8,
    }
    launcher.write_text(yaml.safe_dump(content))
    file = written(trainer, {**SMALLEST[trainer], "bf16": True}, tmp_path)
    for files in ((file, launcher), (launcher, file)):
        found = import_files(files)
        assert found.workload["devices_per_trial"] == 8
        assert found.config["sharding"] == "zero3"
    told = import_files((file, launcher), {"devices_per_trial": 2})
    assert told.workload["devices_per_trial"] == 2


def test_the_file_of_accelerate_alone_needs_the_training_s_own(tmp_path):
    launcher = tmp_path / "accelerate.yaml"
    launcher.write_text("compute_environment: LOCAL_MACHINE\nnum_processes: 2\n")
    with pytest.raises(InvalidInput, match="is accelerate's") as error:
        import_file(launcher)
    assert "--from" in str(error.value.hint)


def test_two_trainings_are_one_sentence(tmp_path):
    first = written("trl", SMALLEST["trl"], tmp_path)
    (tmp_path / "other").mkdir()
    second = written("axolotl", SMALLEST["axolotl"], tmp_path / "other")
    with pytest.raises(InvalidInput, match="several trainings"):
        import_files((first, second))


def test_the_file_of_deepspeed_alone_needs_the_trainer_s_own(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    with pytest.raises(InvalidInput, match="DeepSpeed"):
        import_file(file)


def test_a_launcher_that_trl_brings_is_found_by_its_name(tmp_path):
    found = import_file(written("trl", {**SMALLEST["trl"], "accelerate_config": "zero2"}, tmp_path))
    assert found.workload["devices_per_trial"] == 8
    assert (found.config["sharding"], found.config["engine"]) == ("zero2", "deepspeed")
    with pytest.raises(InvalidInput, match="is not there") as error:
        import_file(written("trl", {**SMALLEST["trl"], "accelerate_config": "zer3"}, tmp_path))
    assert "zero3" in str(error.value.hint)


@pytest.mark.parametrize("settings", [{}, {"adapter": "qlora", "load_in_4bit": True}])
def test_adapters_over_weights_that_are_shared_out_are_trained_so(settings, tmp_path):
    asked = {"adapter": "lora", "fsdp_config": {"offload_params": True}, **settings}
    found = _import("axolotl", tmp_path, fsdp=["full_shard"], **asked)
    assert (found.config["sharding"], found.config["offload"]) == ("zero3", "all")
    assert "fsdp" not in _reasons(found)


def test_adapters_over_weights_that_stage_3_of_zero_shares_out_are_trained_so(tmp_path):
    (tmp_path / "zero3.json").write_text('{"zero_optimization": {"stage": 3}}')
    asked = {"adapter": "qlora", "load_in_4bit": True, "deepspeed": "zero3.json"}
    found = _import("axolotl", tmp_path, **asked)
    assert (found.config["sharding"], found.config["engine"]) == ("zero3", "deepspeed")


def test_weights_that_cannot_be_divided_say_what_trials_do_instead(tmp_path):
    asked = {"adapter": "lora", "load_in_8bit": True, "fsdp": ["full_shard"]}
    found = _import("axolotl", tmp_path, **asked)
    assert found.config["sharding"] == "zero1"
    assert "as base_weights int8 are" in _reasons(found)["fsdp"]


@pytest.mark.parametrize(
    ("degrees", "devices", "sharding", "group"),
    [
        ({"data_parallel_shard_degree": 4}, 4, "zero3", 1),
        ({"data_parallel_shard_degree": 4, "fsdp_reshard_after_forward": "never"}, 4, "zero2", 1),
        ({"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 4}, 8, "hsdp", 4),
        ({"data_parallel_shard_degree": 4, "tensor_parallel_degree": 2}, 8, "zero3", 1),
        ({"data_parallel_replicate_degree": 4, "data_parallel_shard_degree": 1}, 4, "ddp", 1),
    ],
)
def test_degrees_of_torchtitan_say_the_devices(degrees, devices, sharding, group, tmp_path):
    content = {**SMALLEST["torchtitan"], "parallelism": degrees}
    found = import_file(written("torchtitan", content, tmp_path))
    assert found.workload["devices_per_trial"] == devices
    assert (found.config["sharding"], found.config["sharding_group"]) == (sharding, group)
    replicas = devices // degrees.get("tensor_parallel_degree", 1)
    assert found.workload["global_batch"] == found.config["micro_batch_size"] * replicas


@pytest.mark.parametrize(
    ("strategy", "sharding", "engine"),
    [
        ("ddp", "ddp", "torch"),
        ("fsdp", "zero3", "torch"),
        ("deepspeed_stage_3", "zero3", "deepspeed"),
        ("deepspeed_stage_1", "zero1", "deepspeed"),
        ({"class_path": "lightning.pytorch.strategies.FSDPStrategy"}, "zero3", "torch"),
        (
            {
                "class_path": "lightning.pytorch.strategies.DeepSpeedStrategy",
                "init_args": {"stage": 2},
            },
            "zero2",
            "deepspeed",
        ),
    ],
)
def test_a_strategy_of_lightning_is_a_sharding(strategy, sharding, engine, tmp_path):
    trainer = {"precision": "bf16-mixed", "devices": 2, "num_nodes": 2, "strategy": strategy}
    content = {**SMALLEST["lightning"], "trainer": trainer}
    found = import_file(written("lightning", content, tmp_path), OPTIONS["lightning"])
    assert (found.workload["devices_per_trial"], found.workload["nodes_per_trial"]) == (4, 2)
    assert (found.config["sharding"], found.config["engine"]) == (sharding, engine)


@pytest.mark.parametrize("trainer", OF_TRANSFORMERS)
def test_a_file_of_accelerate_for_two_machines_of_eight_is_sixteen_devices_on_two_nodes(
    trainer, tmp_path
):
    launcher = tmp_path / "accelerate.yaml"
    file = written(trainer, SMALLEST[trainer], tmp_path)
    launcher.write_text("distributed_type: MULTI_GPU\nnum_processes: 16\nnum_machines: 2\n")
    found = import_files((file, launcher)).workload
    assert (found["devices_per_trial"], found["nodes_per_trial"]) == (16, 2)
    launcher.write_text("distributed_type: MULTI_GPU\nnum_processes: 16\nnum_machines: 3\n")
    with pytest.raises(InvalidInput, match="16 devices on 3 nodes"):
        import_files((file, launcher))


def test_fp8_beside_split_matrices_is_computed_in_bfloat16_and_said(tmp_path):
    content = {
        "model": {"name": "llama3", "flavor": "8B", "converters": ["float8"]},
        "parallelism": {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
    }
    found = import_file(written("torchtitan", content, tmp_path))
    assert (found.config["precision"], found.config["tensor_parallel"]) == ("bf16-mixed", 2)
    assert "fp8" in _reasons(found)["parallelism.data_parallel_shard_degree"]
