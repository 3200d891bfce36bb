"""Small models, tokenizers and chat data in the formats of the Hugging Face hub.

`python -m tests.building.chat FOLDER` writes a model folder, as a chat model has on the hub, and
`chat.jsonl`.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TURN, END, BEGIN = "<|turn|>", "<|end|>", "<|begin|>"
HEADER, CLOSE = "<|header|>", "<|close|>"
SPECIAL = (BEGIN, TURN, END, HEADER, CLOSE)
VOCABULARY = 384

LIKE_CHATML = (
    "{% for message in messages %}"
    "{{ '<|turn|>' + message.role + '\\n' + message.content + eos_token + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"
)
"""Each turn is one line of its role, the content, and a token that ends it."""

LIKE_LLAMA = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|header|>' + message['role'] + '<|close|>\\n\\n' + message['content'] | trim"
    " + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|header|>assistant<|close|>\\n\\n' }}{% endif %}"
)
"""A beginning, and headers between two tokens; contents are trimmed."""

WITH_MARKS = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|turn|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content + eos_token }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"
)
"""The answers are marked, as trl wants them."""

WITHOUT_PROMPT = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}{{ 'A: ' + message.content + eos_token }}"
    "{% else %}{{ 'Q: ' + message.content + '\\n' }}{% endif %}"
    "{% endfor %}"
)
"""Knows no add_generation_prompt."""

FORGETTING = (
    "{% for message in messages %}"
    "{{ '<|turn|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' and not loop.last %}{{ '...' }}"
    "{% else %}{{ message.content }}{% endif %}{{ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\\n' }}{% endif %}"
)
"""Renders an answer differently when another turn follows."""

TEMPLATES = {"chatml": LIKE_CHATML, "llama": LIKE_LLAMA, "marks": WITH_MARKS}

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def conversations(number: int = 200) -> list[dict[str, Any]]:
    """Returns rows of {"messages"}, with one, two or three answers, some after a system message."""
    rows = []
    for index in range(number):
        messages = []
        if index % 3 == 0:
            messages.append({"role": "system", "content": "Answer with the next word."})
        for turn in range(index % 3 + 1):
            word = (index + turn) % (len(WORDS) - 1)
            messages += [
                {"role": "user", "content": f"What comes after {WORDS[word]}? ({index})"},
                {"role": "assistant", "content": f"It is {WORDS[word + 1]}."},
            ]
        rows.append({"messages": messages})
    return rows


def as_sharegpt(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows as {"conversations"} of from and value."""
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return [
        {
            "conversations": [
                {"from": names[message["role"]], "value": message["content"]}
                for message in row["messages"]
            ]
        }
        for row in rows
    ]


def write_rows(file: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows as JSON lines; return the file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_tokenizer(
    folder: Path,
    *,
    template: str | None = LIKE_CHATML,
    is_in_settings: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write tokenizer.json, tokenizer_config.json and the chat template; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [message["content"] for row in conversations() for message in row["messages"]]
    tokenizer.train_from_iterator([*texts, "system user assistant\n\n" * 9], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": {"__type": "AddedToken", "content": END, "special": True},
        "pad_token": END,
        **(settings or {}),
    }
    if template is not None and is_in_settings:
        content["chat_template"] = template
    elif template is not None:
        (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


def write_model(folder: Path, *, layers: int = 2, width: int = 32, **settings: Any) -> Path:
    """Write config.json and model.safetensors of a small llama; return the folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **{
            "num_hidden_layers": layers,
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 512,
            **settings,
        }
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_chat_model(folder: Path, *, template: str | None = LIKE_CHATML, **settings: Any) -> Path:
    """Write a model with its tokenizer; `settings` are those of its config.json."""
    return write_tokenizer(write_model(folder, **settings), template=template)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    write_chat_model(target / "model")
    write_rows(target / "chat.jsonl", conversations())
