"""Lists the private interfaces of torch that autotune uses, and the torch releases tested.

The interfaces are checked before they are used, so that a release that has changed one of them
causes a message of one sentence instead of a traceback.
"""

from pkgutil import resolve_name

import torch

from autotune.errors import AutotuneError, PredictionImpossible

TESTED_RELEASES = ("2.11", "2.15")
"""The first and the last torch release that the tests of predictions, memory, trainer and
techniques were run with."""

OF_PREDICTIONS = (
    "torch._subclasses.fake_tensor:FakeTensorMode.dispatch",
    "torch._subclasses.fake_tensor:DataDependentOutputException",
    "torch._subclasses.fake_tensor:DynamicOutputShapeException",
    "torch._subclasses.fake_tensor:UnsupportedOperatorException",
    "torch.utils._pytree:tree_iter",
    "torch._C:_current_autograd_node",
    "torch._C._autograd:_get_sequence_nr",
    "torch:UntypedStorage._cdata",
    "torch.nn:Module._compiled_call_impl",
    "torch._functorch.config:enable_autograd_cache",
    "torch._inductor.config:fx_graph_cache",
    "torch._inductor.config:fx_graph_remote_cache",
    "torch._inductor.async_compile:AsyncCompile",
    "torch._inductor.cpu_vec_isa:pick_vec_isa",
    "torch._inductor.cpu_vec_isa:invalid_vec_isa",
    "torch._inductor.graph:GraphLowering._compile_to_module_lines",
    "torch.cpu:_is_amx_tile_supported",
    "torch.cpu:_is_amx_fp16_supported",
    "torch._C._autograd:_disable_profiler_legacy",
    "torch._C._autograd:_enable_profiler_legacy",
    "torch._C._profiler:ProfilerState.CPU",
    "torch._subclasses.fake_tensor:unset_fake_temporarily",
    "torch.utils.flop_counter:flop_registry",
    "torch.utils.weak:WeakIdKeyDictionary",
    "torch:ops.aten.mkldnn_rnn_layer.default",
    "torch:ops.aten.mkldnn_rnn_layer_backward.default",
    "torch:ops.aten._local_scalar_dense.default",
    "torch:ops.aten._grouped_mm.default",
    "torch:ops.aten._scaled_mm.default",
    "torch:ops.aten._scaled_dot_product_attention_math.default",
    "torch:ops.aten._scaled_dot_product_cudnn_attention.default",
    "torch:ops.aten._scaled_dot_product_cudnn_attention_backward.default",
    "torch:ops.aten._scaled_dot_product_efficient_attention.default",
    "torch:ops.aten._scaled_dot_product_efficient_attention_backward.default",
    "torch:ops.aten._scaled_dot_product_flash_attention.default",
    "torch:ops.aten._scaled_dot_product_flash_attention_backward.default",
    "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu.default",
    "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
)

OF_THE_CPU_METER = (
    "torch._C._profiler:_EventType.Allocation",
    "torch._C._autograd:_ProfilerResult.experimental_event_tree",
    "torch:UntypedStorage._cdata",
)

OF_TRIALS = (
    "torch._dynamo.callback:callback_handler.start_callbacks",
    "torch._inductor.cpp_builder:CppBuilder.build",
    "torch._inductor.cpp_builder:CppBuilder.get_command_line",
    "torch._inductor.cpp_builder:CppBuilder.get_target_file_path",
)

OF_SNAPSHOTS = (
    "torch.cuda.memory:_record_memory_history",
    "torch.cuda.memory:_dump_snapshot",
    "torch.cuda.memory:_snapshot",
)


def check_predictions() -> None:
    """Raises PredictionImpossible where the installed torch lacks an interface for predictions."""
    message = _message_if_missing(OF_PREDICTIONS, user="a prediction")
    if message:
        raise PredictionImpossible(message, hint="measure instead: autotune search --no-predict")


def check_trials() -> None:
    """Raises AutotuneError where the installed torch lacks an interface for trials."""
    message = _message_if_missing(OF_TRIALS, user="a trial")
    if message:
        raise AutotuneError(message)


def check_cpu_meter() -> None:
    """Raises AutotuneError where the installed torch lacks an interface for the CPU meter."""
    message = _message_if_missing(OF_THE_CPU_METER, user="the measurement of memory on a CPU")
    if message:
        raise AutotuneError(message)


def check_snapshots() -> None:
    """Raises AutotuneError where the installed torch lacks an interface for snapshots."""
    message = _message_if_missing(OF_SNAPSHOTS, user="--memory-snapshot")
    if message:
        raise AutotuneError(message)


def _message_if_missing(names: tuple[str, ...], *, user: str) -> str:
    """Returns a message about the first of `names` that torch lacks, empty if it has them all.

    Each name is `module:attribute`; `user` is what needs it.
    """
    first, last = TESTED_RELEASES
    for name in names:
        try:
            resolve_name(name)
        except (ImportError, AttributeError):
            interface = name.replace(":", ".")
            return (
                f"torch {torch.__version__} has no {interface}, which {user} needs: "
                f"tested with torch {first} to {last}"
            )
    return ""
