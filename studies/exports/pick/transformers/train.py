"""Trains with autotune_trainer.py. Replace each <NAME>, then: python train.py"""

from autotune_trainer import AutotuneTrainer, model_kwargs, sequences, training_arguments  # first

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

set_seed(0)
tokenizer = AutoTokenizer.from_pretrained("<MODEL>")
special = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def encode(text):
    return tokenizer(text, add_special_tokens=False)["input_ids"] + special


# The trial's model was gpt of 6 layers, width 128.
model = AutoModelForCausalLM.from_pretrained("<MODEL>", **model_kwargs())
rows = load_dataset("text", data_files="<TEXT FILE>", split="train")
texts = [text for text in rows['text'] if text]

trainer = AutotuneTrainer(
    model=model,
    args=training_arguments("trainer_output", logging_steps=1),
    train_dataset=sequences(texts, encode),
)
trainer.train()
trainer.save_model()
