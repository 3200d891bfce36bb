"""Every technique is really applied: its effect shows in the operators and the tensors."""

import subprocess
import sys

import pytest
import torch

from autotune.shipped.fsdp import sharded_units
from autotune.shipped.segments import recompute_segments
from autotune.techniques.precision import unavailable
from tests.techniques.operators import operators_in_a_step

LAYERS = 4
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
MATRIX_PRODUCTS_IN_A_BLOCK = 5  # query-key-value, output, gate, up, down


@pytest.fixture
def operators(make_trainer):
    def count(**choices):
        return operators_in_a_step(make_trainer(**choices))

    return count


@pytest.mark.parametrize(
    ("value", "blocks"), [("none", 0), ("every-4", 1), ("every-2", 2), ("block", 4), ("sqrt", 4)]
)
def test_whole_blocks_are_recomputed_as_often_as_the_granularity_says(value, blocks, operators):
    assert operators(checkpointing=value)[ATTENTION] == LAYERS + blocks


def test_attention_checkpointing_recomputes_only_the_attention_part(operators):
    plain, checkpointed = operators(), operators(checkpointing="attention")
    assert checkpointed[ATTENTION] == 2 * LAYERS
    # Its two products again, less the last one, which no gradient needs.
    assert checkpointed["mm"] - plain["mm"] == LAYERS


def test_selective_checkpointing_recomputes_no_matrix_product(operators):
    plain, selective = operators(), operators(checkpointing="selective")
    assert (selective["mm"], selective[ATTENTION]) == (plain["mm"], plain[ATTENTION])


def test_selective_2_recomputes_every_second_matrix_product(operators):
    plain, alternating = operators(), operators(checkpointing="selective-2")
    assert alternating["mm"] - plain["mm"] == LAYERS * (MATRIX_PRODUCTS_IN_A_BLOCK // 2)
    assert alternating[ATTENTION] == plain[ATTENTION]


def test_save_attention_recomputes_matrix_products_and_no_attention(operators):
    plain, saving = operators(), operators(checkpointing="save-attention")
    block = operators(checkpointing="block")
    assert saving[ATTENTION] == plain[ATTENTION]
    assert saving["mm"] == block["mm"]


def test_selective_checkpointing_recomputes_the_rest(operators):
    assert operators(checkpointing="selective")["silu"] == 2 * operators()["silu"]


def test_block_checkpointing_recomputes_matrix_products(operators):
    # All but each block's last product, which no gradient needs.
    extra = operators(checkpointing="block")["mm"] - operators()["mm"]
    assert extra == LAYERS * (MATRIX_PRODUCTS_IN_A_BLOCK - 1)


def test_sqrt_makes_about_sqrt_of_layers_segments(make_trainer):
    blocks = make_trainer(checkpointing="sqrt").training.parts.blocks
    assert [len(unit) for unit in sharded_units(list(blocks))] == [2, 2]


@pytest.mark.parametrize("layers", range(1, 40))
def test_segments_hold_every_block_once_and_none_is_empty(layers):
    blocks = [torch.nn.Identity() for _ in range(layers)]
    recompute_segments(blocks)
    units = sharded_units(blocks)
    assert [block for unit in units for block in unit] == blocks
    assert len(units) == round(layers**0.5)


@pytest.mark.parametrize(
    ("value", "weights", "products"),
    [
        ("fp32", torch.float32, torch.float32),
        ("bf16-mixed", torch.float32, torch.bfloat16),
        ("fp16-mixed", torch.float32, torch.float16),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
    ],
)
def test_precision_decides_the_dtypes_of_weights_and_products(
    value, weights, products, make_trainer
):
    trainer = make_trainer(precision=value)
    seen = set()
    trainer.training.parts.model.blocks[0].feed_forward.gate.register_forward_hook(
        lambda _module, _inputs, output: seen.add(output.dtype)
    )
    trainer.step(0, next(trainer.batches()))
    assert {p.dtype for p in trainer.training.parts.model.parameters()} == {weights}
    assert seen == {products}


def test_tf32_is_allowed_only_for_tf32(make_trainer):
    make_trainer(precision="tf32")
    allowed = torch.get_float32_matmul_precision()
    make_trainer(precision="fp32")
    assert (allowed, torch.get_float32_matmul_precision()) == ("high", "highest")


def test_a_cpu_has_no_tf32():
    assert (
        unavailable("tf32", device=torch.device("cpu"))
        == "TF32 belongs to NVIDIA GPUs, the device is cpu"
    )


@pytest.mark.gpu
def test_tf32_is_available_from_ampere_on_even_if_a_small_product_does_not_use_it():
    found = unavailable("tf32", device=torch.device("cuda:0"))
    assert (found is None) == (torch.cuda.get_device_capability(0) >= (8, 0))


def test_fp16_scales_its_loss(make_trainer):
    weight = torch.ones((), requires_grad=True)
    make_trainer(precision="fp16-mixed").training.updater.backward(weight * 1.0)
    assert weight.grad > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scope", "graphs"), [("block", 1), pytest.param("model", 1, marks=pytest.mark.slow)]
)
def test_compiling_by_block_takes_one_graph_for_all_blocks(scope, graphs, compiler, make_trainer):
    torch._dynamo.utils.counters.clear()
    trainer = make_trainer(compile=scope)
    trainer.step(0, next(trainer.batches()))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_the_fused_kernel_updates_all_parameters_at_once(operators):
    count = operators(optimizer_fusion="kernel")
    assert count["_fused_adamw_"] == 1


def test_foreach_updates_in_batches(operators):
    assert operators(optimizer_fusion="foreach")["_foreach_addcdiv_"] == 1


def test_no_fusion_loops_over_the_parameters(operators, make_trainer):
    parameters = len(list(make_trainer().training.parts.model.parameters()))
    assert operators(optimizer_fusion="none")["addcdiv_"] == parameters


def test_a_step_in_backward_never_holds_two_gradients(make_trainer):
    trainer = make_trainer(optimizer_fusion="backward")
    parameters = list(trainer.training.parts.model.parameters())
    alive = []
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(p.grad is not None for p in parameters))
        )
    trainer.step(0, next(trainer.batches()))
    assert len(alive) == len(parameters)
    assert max(alive) == 0  # the hook of the step, registered first, has freed it already


@pytest.mark.parametrize("fusion", ["none", "foreach", "kernel", "backward"])
def test_no_gradient_is_left_after_a_step(fusion, make_trainer):
    trainer = make_trainer(optimizer_fusion=fusion)
    trainer.step(0, next(trainer.batches()))
    assert all(p.grad is None for p in trainer.training.parts.model.parameters())


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_a_step_takes_as_many_forward_passes_as_there_are_micro_batches(
    micro_batch_size, operators
):
    count = operators(micro_batch_size=micro_batch_size)
    assert count[ATTENTION] == LAYERS * 4 // micro_batch_size


@pytest.mark.parametrize(("optimizer", "states"), [("adamw", 2), ("sgd", 1)])
def test_an_optimizer_has_as_much_state_as_documented(optimizer, states, make_trainer):
    trainer = make_trainer(optimizer=optimizer)
    trainer.step(0, next(trainer.batches()))
    parameters = sum(p.numel() for p in trainer.training.parts.model.parameters())
    state = sum(t.numel() for t in trainer.training.updater.state() if t.dim() > 0)
    assert state == states * parameters


@pytest.mark.parametrize("optimizer", ["adafactor", "adafactor-fixed-rate"])
def test_adafactor_stores_a_row_and_a_column(optimizer, make_trainer):
    trainer = make_trainer(optimizer=optimizer)
    trainer.step(0, next(trainer.batches()))
    parameters = sum(p.numel() for p in trainer.training.parts.model.parameters())
    assert sum(t.numel() for t in trainer.training.updater.state()) < parameters / 10


@pytest.mark.gpu
def test_expandable_segments_are_expandable_in_a_process_forked_after_torch_was_imported():
    code = (
        "import os, torch\n"
        "if os.fork() == 0:\n"
        "    from autotune.techniques.allocator import set_allocator; set_allocator('expandable')\n"
        "    x = torch.zeros(2**22, device='cuda')\n"
        "    print(all(s['is_expandable'] for s in torch.cuda.memory_snapshot()), flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "True"


@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
def test_adafactor_is_one_algorithm_in_every_precision(precision, make_trainer):
    """By default torch takes eps from the dtype of the weights."""
    optimizer = make_trainer(optimizer="adafactor", precision=precision).training.updater.optimizer
    assert optimizer.defaults["eps"] == (torch.finfo(torch.float32).eps, 1e-3)
