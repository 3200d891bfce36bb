"""Files of trainers as people write them: comments, quotes, anchors, spellings of their own."""

TRL = """\
# our run, 2026-11   (keep!)
model_name_or_path: Qwen/Qwen2.5-0.5B   # small
dataset_name: trl-lib/Capybara

per_device_train_batch_size: 2    # fits
per_device_eval_batch_size: 2
gradient_accumulation_steps: 4
max_seq_length:   1024
learning_rate: 2.0e-5
torch_dtype: "bfloat16"
bf16: True
optim:   adamw_torch
activation_checkpointing: yes
activation_checkpointing_kwargs: {use_reentrant: false}   # new way
output_dir: out
"""

TRL_WITH_ANCHORS = """\
model_name_or_path: 'Qwen/Qwen2.5-0.5B'
datasets: &data
- path: trl-lib/Capybara   # conversations
model_init_kwargs: &init
  dtype: bfloat16
  attn_implementation: flash_attention_2

chat_template_path: |
  {% for message in messages %}{{ message.content }}
  {% endfor %}

per_device_train_batch_size: &batch 4  # the same for both
per_device_eval_batch_size: *batch
gradient_checkpointing_kwargs: &kwargs
  use_reentrant: false
activation_checkpointing_kwargs: *kwargs
report_to: [wandb,
            tensorboard]
optim: "adamw_bnb_8bit"
use_peft: true
lora_r: 16
lora_target_modules:
# all of them
- all-linear
"""

AXOLOTL = """\
base_model: NousResearch/Llama-3.2-1B

datasets:
  - path: teknium/GPT4-LLM-Cleaned
    type: completion   # raw text
plugins:
  - axolotl.integrations.liger.LigerPlugin
liger_rms_norm: true
liger_fused_linear_cross_entropy: true

flash_attention: true
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_linear: true

sequence_len: 2048
micro_batch_size: 2  # fits
gradient_accumulation_steps: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
bf16: auto
tf32: false
gradient_checkpointing: true
activation_offloading: true


special_tokens:
   pad_token: "<|end_of_text|>"
"""

AXOLOTL_FULL = """\
base_model: "NousResearch/Llama-3.2-1B"\r
pretraining_dataset: allenai/c4\r
micro_batch_size: 1\r
batch_size: 8 # of a step\r
sequence_len: 1024\r
optimizer: 'adamw_torch_fused'\r
learning_rate: 1e-5\r
bfloat16: yes\r
gradient_checkpointing: True\r
gradient_checkpointing_kwargs:\r
    use_reentrant: true # slow\r
attn_implementation: eager\r
torch_compile: False"""

ARGUMENTS = """\
{
    "model_name_or_path": "gpt2",
    "block_size": 512,
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
    "learning_rate": 5e-5,
    "bf16": true,
    "optim": "adamw_torch",
    "gradient_checkpointing": false,
    "output_dir": "\\u00e9t\\u00e9",
    "report_to": ["wandb"]
}
"""

ARGUMENTS_WITH_TABS = """\
{
\t"per_device_train_batch_size": 8,
\t"gradient_checkpointing": true,
\t"gradient_checkpointing_kwargs": {
\t\t"use_reentrant": false
\t},
\t"torch_compile": true,
\t"torch_compile_backend": "inductor",
\t"output_dir": "out"
}"""

TORCHTITAN = """\
# torchtitan, one GPU
[job]
dump_folder = "./outputs"   # here

[model]
name = "llama3"
flavor = "8B"

[optimizer]
name = "AdamW"
lr = 8e-4

[training]
local_batch_size = 4   # fits
seq_len = 2048
steps = 1_000

[parallelism]
data_parallel_shard_degree = 1

[activation_checkpoint]
mode = "selective"  # ["none", "selective", "full"]
selective_ac_option = "op"

[compile]
enable=false
components = ["model", "loss"]
"""

LIGHTNING = """\
seed_everything: 7
trainer:
    accelerator: gpu   # one
    devices: 1
    precision: 32-true
    accumulate_grad_batches: 2
    max_steps: 1000
    logger: &logger
        class_path: lightning.pytorch.loggers.CSVLogger
        init_args: {save_dir: logs}
model:
    class_path: ours.Model
data:
    class_path: ours.Data
    init_args:
        batch_size: 4   # of a device
        max_seq_length: 512
optimizer:
    class_path: torch.optim.AdamW
    init_args:
        lr: 3.0e-4
        foreach: true
"""

LLAMAFACTORY = """\
### model
model_name_or_path: meta-llama/Llama-3.2-1B
flash_attn: fa2

### method
stage: sft
do_train: true
finetuning_type: lora
lora_target: all   # every linear layer
quantization_bit: 4

### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
bf16: true
ddp_timeout: 180000000
cutoff_len: 512
output_dir: saves
"""

FILES = {
    "trl": ("sft.yaml", TRL, "trl"),
    "trl with anchors": ("anchors.yaml", TRL_WITH_ANCHORS, "trl"),
    "axolotl": ("lora.yml", AXOLOTL, "axolotl"),
    "axolotl, all weights": ("full.yaml", AXOLOTL_FULL, "axolotl"),
    "llamafactory": ("llama.yaml", LLAMAFACTORY, "llamafactory"),
    "arguments": ("args.json", ARGUMENTS, "transformers"),
    "arguments with tabs": ("tabs.json", ARGUMENTS_WITH_TABS, "transformers"),
    "torchtitan": ("llama.toml", TORCHTITAN, "torchtitan"),
    "lightning": ("lightning.yaml", LIGHTNING, "lightning"),
}
"""{case: (name of the file, its text, the target that writes such files)}."""
