"""The text of an exported script, with the passages, tokens, held-out part and order of a study."""

from typing import Any

from autotune.exporters.bundle import Part, code, shipped
from autotune.spec.workload import STANDARD_LIBRARY_TEXT, Workload


def data_parts(workload: Workload) -> list[Part]:
    """Returns the definition of `read_text(folder, text)`, and the settings of the text.

    It returns the training and the held-out part, each of which makes batches.
    """
    return [_settings(workload), shipped(*(f"script.{module}" for module in _modules(workload)))]


def _settings(workload: Workload) -> Part:
    settings: dict[str, Any] = {
        "DATASET_CONFIG: str | None": workload.dataset_config,
        "DATASET_SPLIT": workload.dataset_split,
        "HELD_OUT_SPLIT: str | None": workload.held_out_split,
        "STREAMING": workload.streaming,
    }
    format = workload.prompts
    if workload.has_conversations:
        settings["LEARNED"] = "answers" if format is None else format.learned
    if format is not None:
        settings["PROMPT_FORMAT"] = format.to_dict()
    elif workload.chat_column is not None:
        settings["CHAT_COLUMN"] = workload.chat_column
    else:
        settings["TEXT_COLUMN: str | None"] = workload.text_column
    if workload.tokenizer not in ("bytes", "bpe"):
        settings["TOKENIZER"] = workload.tokenizer
    return code("\n".join(f"{name} = {value!r}" for name, value in settings.items()))


def _modules(workload: Workload) -> list[str]:
    is_built_in = workload.dataset == STANDARD_LIBRARY_TEXT
    modules = ["standard_library" if is_built_in else "documents"]
    if workload.has_conversations:
        is_column = workload.prompt_format is None
        modules += ["messages_in_column" if is_column else "messages_of_columns", "chat_rows"]
    else:
        modules.append("text_rows" if workload.prompt_format is None else "prompt_rows")
    is_packed = workload.packing == "packed"
    modules.append("passages" if is_packed else "beginnings")
    tokenizers = {"bytes": "tokenizer_of_bytes", "bpe": "tokenizer_by_bpe"}
    modules.append(tokenizers.get(workload.tokenizer, "tokenizer_from_file"))
    if workload.learns_answers:
        modules += ["packed_chat" if is_packed else "padded_chat", "chat", "rows_of_tokens"]
    elif is_packed:
        modules.append("packed")
    else:
        modules += ["padded", "rows_of_tokens"]
    return [*modules, "read_text"]
