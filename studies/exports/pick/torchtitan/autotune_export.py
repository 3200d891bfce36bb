# study tour, trial 39
"""A configuration of torchtitan 0.3's Trainer, for `--module autotune_export --config autotune`."""

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel


def autotune():
    c = llama3_debugmodel()  # put the configuration of your own model here
    c.model_spec = model_registry("debugmodel", attn_backend="flex")
    c.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(c.model_spec))
    c.optimizer = default_adamw(betas=(0.9, 0.999), eps=1e-08, lr=0.002, weight_decay=0.01)
    c.activation_checkpoint = FullAC.Config()
    c.training.local_batch_size = 4
    c.training.global_batch_size = 8
    c.training.seq_len = 128
    c.training.steps = 30
    c.training.max_norm = float("inf")  # no clipping
    c.training.dtype = "float32"
    c.training.mixed_precision_param = "float32"
    c.parallelism.data_parallel_replicate_degree = 1
    c.parallelism.data_parallel_shard_degree = 1
    c.parallelism.fsdp_reshard_after_forward = "always"
    c.parallelism.tensor_parallel_degree = 1
    c.training.enable_cpu_offload = False
    c.lr_scheduler.warmup_steps = 10
    c.lr_scheduler.total_steps = 30
    c.lr_scheduler.decay_ratio = 0.0
    c.lr_scheduler.decay_type = "linear"
    c.lr_scheduler.min_lr_factor = 0.0
    c.compile.enable = True
    c.compile.components = ["model"]
    c.debug.seed = 0
    c.training.disable_cuda_graphs = True
    c.optimizer.implementation = "for-loop"
    return c
