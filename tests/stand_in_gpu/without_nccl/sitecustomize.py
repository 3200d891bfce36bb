"""Has ranks on stand-in GPUs do without NCCL, which does not start.

Python imports it at its start where this folder is in PYTHONPATH (`Machine.python_path`).
STAND_IN_EXCHANGE=fake: what is on a GPU is not exchanged, and each rank believes that the others
have taken part, as FSDP2 needs it. STAND_IN_EXCHANGE=gloo: it is added up and broadcast by the
host's memory, as DDP needs it; the kernels between are hollow, so that losses are right for some
steps only. What ranks say to each other by the CPU is real.
"""

import os
import sys

if "autotune.execution.server.fork_server" in sys.orig_argv:
    import torch.distributed
    import torch.testing._internal.distributed.fake_pg

    _init_process_group = torch.distributed.init_process_group

    def _without_nccl(_backend: str, **options: object) -> None:
        backend = os.environ["STAND_IN_EXCHANGE"]
        _init_process_group(f"cpu:gloo,cuda:{backend}", **options)

    torch.distributed.init_process_group = _without_nccl
