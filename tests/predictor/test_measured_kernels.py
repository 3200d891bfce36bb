"""What kernels allocate, by a run on zeros, compared with a real run."""

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autotune.predictor import measured_kernels, recurrent
from autotune.predictor.cpu import CpuKernels
from autotune.predictor.cuda import CudaKernels
from autotune.predictor.fake_mode import StorageWatch
from autotune.predictor.gpu import gpu_of
from autotune.predictor.measured_kernels import MeasuredKernels, allocations, peak_bytes

aten = torch.ops.aten


def sliced(*shape) -> Tensor:
    """A tensor of which neither rows nor columns are contiguous, as einsum makes them."""
    return torch.randn(*shape, 2)[..., 0]


CONVOLUTION = ([1], [3], [1], False, [0], 1)
KERNELS = {
    "a convolution": (
        aten.convolution.default,
        [torch.randn(160, 24, 200), torch.randn(48, 24, 4), torch.randn(48), *CONVOLUTION],
    ),
    "its backward": (
        aten.convolution_backward.default,
        [
            *(torch.randn(160, 48, 203), torch.randn(160, 24, 200), torch.randn(48, 24, 4)),
            *([48], *CONVOLUTION, [True, True, True]),
        ],
    ),
    "a product of copied operands": (
        aten.bmm.default,
        [sliced(500, 40, 24), sliced(500, 24, 56)],
    ),
    "a 16-bit sum at indices": (
        aten.scatter_add.default,
        [
            torch.zeros(20_000, 80, dtype=torch.bfloat16),
            *(1, torch.randint(80, (20_000, 20)), torch.randn(20_000, 20, dtype=torch.bfloat16)),
        ],
    ),
    "a cumulative sum of 16-bit numbers": (
        aten.cumsum.default,
        [torch.randn(20_000, 80, dtype=torch.bfloat16), 1],
    ),
    "a sort": (aten.sort.default, [torch.randn(20_000, 80)]),
}


def real_bytes(operator, args) -> int:
    with torch.no_grad(), allocations() as sizes:
        result = operator(*args)
    results = [result] if isinstance(result, Tensor) else result
    return peak_bytes(sizes) - sum(one.untyped_storage().nbytes() for one in results)


def predicted_bytes(operator, args) -> int:
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(arg) if isinstance(arg, Tensor) else arg for arg in args]
        return MeasuredKernels().scratch_bytes(operator, fakes, {}, operator(*fakes))


@pytest.mark.parametrize("case", KERNELS)
def test_what_a_kernel_allocates_is_measured_on_zeros(case):
    operator, args = KERNELS[case]
    assert predicted_bytes(operator, args) == real_bytes(operator, args)


@pytest.mark.parametrize("case", KERNELS)
def test_a_large_kernel_is_measured_at_smaller_sizes(case, monkeypatch):
    operator, args = KERNELS[case]
    monkeypatch.setattr(measured_kernels, "MOST_BYTES", 0)
    real = real_bytes(operator, args)
    assert predicted_bytes(operator, args) == pytest.approx(real, rel=0.02, abs=64)


def test_a_kernel_is_run_once_for_each_layout(monkeypatch):
    runs = []
    run = MeasuredKernels._run
    monkeypatch.setattr(
        MeasuredKernels, "_run", lambda self, call: runs.append(call) or run(self, call)
    )
    kernels = MeasuredKernels()
    with FakeTensorMode():
        rows, columns = torch.ones(8, 4), torch.ones(4, 8)
        for args in ([rows, 1], [rows, 1], [columns, 1], [rows, 0]):
            kernels.scratch_bytes(aten.cumsum.default, args, {}, aten.cumsum.default(*args))
    assert len(runs) == 3


def test_an_operator_that_fails_on_zeros_is_named_and_allowed_for():
    kernels = CpuKernels()
    with FakeTensorMode():
        matrix = torch.ones(8, 8)
        operator = aten.linalg_cholesky_ex.default
        args = [matrix]
        kwargs = {"check_errors": True}
        kernels.scratch_bytes(operator, args, operator(*args, **kwargs), kwargs)
    assert kernels.unknown_bytes == matrix.numel() * 4
    (note,) = kernels.notes()
    assert "aten.linalg_cholesky_ex" in note


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [20, 200])
def test_what_an_lstm_keeps_and_allocates_is_known(dtype, length, monkeypatch):
    monkeypatch.setattr(recurrent, "MOST_OPERATIONS", 0)  # 200 tokens follow from 48
    layer = nn.LSTM(24, 40, batch_first=True).to(dtype)
    calls = recorded_calls(layer, torch.randn(3, length, 24, dtype=dtype, requires_grad=True))
    assert [operator for operator, *_ in calls] == kernels_of_an_lstm(dtype)
    kernels = recurrent.RecurrentKernels()
    for operator, args, real, workspace in calls:
        assert kernels.scratch_bytes(operator, args) == pytest.approx(real, rel=0.03)
        if operator is recurrent.FORWARD:
            assert kernels.workspace_bytes(args) == pytest.approx(workspace, rel=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_lstm_of_fake_tensors_runs_the_kernels_of_a_real_one(dtype):
    with FakeTensorMode():
        assert kernels_run_by_an_lstm(dtype) == kernels_of_an_lstm(dtype)
    assert kernels_run_by_an_lstm(dtype) == kernels_of_an_lstm(dtype)


def kernels_of_an_lstm(dtype) -> list:
    """Returns oneDNN's kernels of an LSTM; none in 16 bits on processors without AVX-512.

    There torch runs the products and sums of each step instead, as aten/src/ATen/native/RNN.cpp
    decides.
    """
    if dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return []
    return [recurrent.FORWARD, recurrent.BACKWARD]


def kernels_run_by_an_lstm(dtype) -> list:
    """Returns which of oneDNN's kernels of an LSTM a step of a small one runs."""
    kernels = []

    class Recorded(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operator, _types, args=(), kwargs=None):
            if operator in (recurrent.FORWARD, recurrent.BACKWARD):
                kernels.append(operator)
            return operator(*args, **(kwargs or {}))

    layer = nn.LSTM(24, 40, batch_first=True, dtype=dtype)
    x = torch.ones(3, 4, 24, dtype=dtype, requires_grad=True)
    with Recorded():
        layer(x)[0].sum().backward()
    return kernels


def recorded_calls(layer, x) -> list:
    """Returns each kernel of an LSTM with its arguments, its bytes and those of its workspace."""
    calls = []

    class Recorded(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operator, _types, args=(), kwargs=None):
            if operator not in (recurrent.FORWARD, recurrent.BACKWARD):
                return operator(*args, **(kwargs or {}))
            with allocations() as sizes:
                results = operator(*args)
            storages = {one.untyped_storage()._cdata: one.untyped_storage() for one in results}
            kept = sum(one.nbytes() for one in storages.values())
            workspace = results[3].untyped_storage().nbytes()
            calls.append((operator, args, peak_bytes(sizes) - kept, workspace))
            return results

    with Recorded():
        layer(x)[0].sum().backward()
    return calls


def blocks_of(run) -> list[int]:
    """Returns the sizes of what `run(watch)` allocates on fake tensors."""
    watch = StorageWatch()
    with watch.mode:
        prepared = run(watch)
        with watch.recording(lambda: ()) as recording:
            prepared()
    return [block.size_bytes for sign, block in recording.events if sign > 0]


def test_what_a_fake_kernel_consists_of_is_no_memory():
    def run(_watch):
        bias, rows = torch.ones(8, dtype=torch.bfloat16), torch.ones(4, 16, dtype=torch.bfloat16)
        columns = torch.ones(16, 8, dtype=torch.bfloat16)
        out = torch.empty(4, 8, dtype=torch.bfloat16)
        return lambda: aten.addmm.out(bias, rows, columns, out=out)

    assert blocks_of(run) == []


@pytest.mark.parametrize("chosen", ["gather", "index"])
def test_the_gradient_of_chosen_elements_is_allocated_once(chosen):
    def run(_watch):
        source = torch.ones(64, 32, requires_grad=True)
        index = torch.zeros(64, 4, dtype=torch.int64)
        result = source.gather(1, index) if chosen == "gather" else source[index[:, 0]]
        gradient = torch.ones_like(result)
        return lambda: torch.autograd.grad(result, source, gradient)

    assert blocks_of(run).count(64 * 32 * 4) == 1


def test_on_cuda_no_kernel_runs_and_an_lstm_is_named_as_left_out():
    kernels = CudaKernels(gpu_of(None, None))
    assert kernels.scratch(recurrent.FORWARD, [], (), {}) == ()
    notes = list(kernels.assumptions(compiled=False, autocast=False, torch_version=None))
    assert any("LSTM" in note for note in notes)


@pytest.mark.parametrize("columns", [1, 48])
def test_on_cuda_a_safe_softmax_marks_what_is_masked_and_which_rows_are_as_a_whole(columns):
    rows = torch.zeros(64, columns)
    kernels = CudaKernels(gpu_of("9.0", "2.11"))
    scratch = kernels.scratch(torch.ops.aten._safe_softmax.default, [rows, -1], rows, {})
    assert scratch == [[64 * columns, 64, 1]]
