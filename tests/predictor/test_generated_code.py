"""Programs that inductor generates, run on fake tensors."""

import pytest
import torch
import torch._dynamo

from autotune.predictor.fake_mode import StorageWatch
from autotune.predictor.generated_code import GeneratedPrograms

ROWS, WIDTH, PADDED_WIDTH = 64, 1376, 1408


@pytest.mark.parametrize(("for_gpu", "width"), [(True, PADDED_WIDTH), (False, WIDTH)])
def test_rows_are_padded_to_128_bytes_for_a_gpu(for_gpu, width):
    """As inductor pads there what compiled code keeps for itself."""

    @torch.compile
    def two_products(x, up, down):
        return (torch.mm(x, up) * 2).relu() @ down

    torch._dynamo.reset()
    watch = StorageWatch()
    with watch.mode, GeneratedPrograms(watch, for_gpu=for_gpu).active():
        x, up, down = (
            torch.empty(*shape, dtype=torch.bfloat16)
            for shape in ((ROWS, 256), (256, WIDTH), (WIDTH, 256))
        )
        with watch.recording(list) as recording:
            two_products(x, up, down)
    largest = max(block.size_bytes for _, block in recording.events)
    assert largest == 2 * ((ROWS - 1) * width + WIDTH)  # the last row is not padded
