"""The Hugging Face hub: data sets and tokenizers by name, and one sentence at once where it cannot be reached.

Its libraries try again and again for half a minute without a network. So one short question is
asked before.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autotune.errors import InvalidDataset, InvalidInput
from autotune.spec.workload import STANDARD_LIBRARY_TEXT, Workload

TIMEOUT_SECONDS = 10


def is_local_name(name: str, *, suffixes: Sequence[str]) -> bool:
    """Whether `name` can be nothing but a path."""
    return (
        Path(name).suffix.lower() in suffixes
        or name.startswith((".", "/", "~"))
        or name.count("/") > 1
    )


def check_dataset(name: str) -> None:
    """Asks the hub for the data set.

    Raises InvalidDataset where it has none of that name or cannot be reached.
    """
    try:
        _ask(lambda hub: hub.dataset_info(name, timeout=TIMEOUT_SECONDS))
    except Exception as error:
        raise _not_loaded(name, error) from error


def load_rows(workload: Workload, *, split: str) -> Any:
    """The rows of a split, as `datasets` gives them, in its own cache. Raises InvalidDataset."""
    name = workload.dataset
    check_dataset(name)
    datasets = quiet_datasets()
    try:
        return datasets.load_dataset(
            name, workload.dataset_config, split=split, streaming=workload.streaming
        )
    except Exception as error:
        raise _not_loaded(name, error) from error


def quiet_datasets() -> Any:
    """The library, imported where it is needed, which takes a second; what it has to say comes as an error."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    return datasets


def _not_loaded(name: str, error: Exception) -> InvalidDataset:
    return InvalidDataset(
        f"dataset {name!r} is no local path and cannot be loaded from the Hugging Face hub: {reason_of(error)}",
        hint="name a local text, jsonl, csv or parquet file, check the hub name, its config and split, "
        f"or use --dataset {STANDARD_LIBRARY_TEXT}",
    )


def tokenizer_file(name: str) -> Path:
    """The tokenizer.json of the hub's repository `name`, with its settings beside it.

    Raises InvalidInput.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError

    try:
        if isinstance(known := try_to_load_from_cache(name, "tokenizer.json"), str):
            return Path(known)
        _ask(lambda hub: hub.model_info(name, timeout=TIMEOUT_SECONDS))
        try:
            hf_hub_download(name, "tokenizer_config.json")
        except EntryNotFoundError:
            pass  # the usual names of special tokens are known
        return Path(hf_hub_download(name, "tokenizer.json"))
    except Exception as error:
        raise InvalidInput(
            f"tokenizer {name!r} is no local path and cannot be loaded from the Hugging Face hub: {reason_of(error)}",
            hint="name a local tokenizer.json or a folder with one, or use --tokenizer bpe or bytes",
        ) from error


def _ask(question: Callable[[Any], object]) -> None:
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        return
    try:
        question(HfApi())
    except (HfHubHTTPError, ValueError):  # an answer, or a name it cannot be asked about
        raise
    except Exception as error:
        raise ConnectionError(f"there is no connection to it ({reason_of(error)})") from None


def reason_of(error: BaseException) -> str:
    """The first line of what a library says, or what kind of error it is."""
    lines = str(error.__cause__ or error).strip().splitlines() or str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
