"""Load datasets and tokenizers by name from the Hugging Face hub, failing fast without a network.

The hub's libraries retry for half a minute without a network, so a short request is made first.
They are imported where they are used: that takes a quarter of a second, `datasets` even seconds,
and most studies read local files.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autotune.data.dataset_card import CARD, CARD_OF_YAML, checked_configs
from autotune.errors import InvalidDataset, InvalidInput
from autotune.spec.workload import STANDARD_LIBRARY_TEXT, Workload

TIMEOUT_SECONDS = 10


def is_local_name(name: str, *, suffixes: Sequence[str]) -> bool:
    """Whether `name` can only be a path, not a name on the hub."""
    return (
        Path(name).suffix.lower() in suffixes
        or name.startswith((".", "/", "~"))
        or name.count("/") > 1
    )


def check_dataset(name: str) -> None:
    """Raise InvalidDataset if the hub has no dataset of that name or cannot be reached."""
    try:
        _request(lambda hub: hub.dataset_info(name, timeout=TIMEOUT_SECONDS))
    except Exception as error:
        raise _not_loaded(name, error) from error


def load_rows(workload: Workload, *, split: str) -> Any:
    """Returns the rows of a split as `datasets` loads them, cached there. Raises InvalidDataset."""
    name = workload.dataset
    check_dataset(name)
    _check_card(name)
    datasets = quiet_datasets()
    try:
        return datasets.load_dataset(
            name, workload.dataset_config, split=split, streaming=workload.streaming
        )
    except Exception as error:
        raise _not_loaded(name, error) from error


def _check_card(name: str) -> None:
    """Raise InvalidDataset where the card of a dataset names files that are not its own.

    They could be files of this machine.
    """
    from huggingface_hub import hf_hub_download  # noqa: PLC0415
    from huggingface_hub.errors import EntryNotFoundError  # noqa: PLC0415

    texts = []
    for file in (CARD, CARD_OF_YAML):
        try:
            texts.append(Path(hf_hub_download(name, file, repo_type="dataset")).read_bytes())
        except EntryNotFoundError:
            pass  # also where it was not there when the dataset was downloaded
        except Exception as error:
            raise _not_loaded(name, error) from error
    checked_configs(texts, dataset=name, own_address=f"hf://datasets/{name}")


def quiet_datasets() -> Any:
    """Import `datasets`, which takes a second, and turn its progress bars and log off."""
    import datasets  # noqa: PLC0415

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    return datasets


def _not_loaded(name: str, error: Exception) -> InvalidDataset:
    return InvalidDataset(
        f"dataset {name!r} is not a local path and cannot be loaded from the Hugging Face hub: "
        f"{reason_of(error)}",
        hint="name a local text, jsonl, csv or parquet file, check the hub name, its config and "
        f"split, or use --dataset {STANDARD_LIBRARY_TEXT}",
    )


def tokenizer_file(name: str) -> Path:
    """Returns the tokenizer.json of repository `name`, with tokenizer_config.json next to it.

    Raises InvalidInput if it cannot be loaded.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache  # noqa: PLC0415
    from huggingface_hub.errors import EntryNotFoundError  # noqa: PLC0415

    try:
        cached = try_to_load_from_cache(name, "tokenizer.json")
        if isinstance(cached, str):
            return Path(cached)
        _request(lambda hub: hub.model_info(name, timeout=TIMEOUT_SECONDS))
        try:
            hf_hub_download(name, "tokenizer_config.json")
        except EntryNotFoundError:
            pass  # the usual names of the special tokens are used
        return Path(hf_hub_download(name, "tokenizer.json"))
    except Exception as error:
        raise InvalidInput(
            f"tokenizer {name!r} is not a local path and cannot be loaded from the Hugging Face "
            f"hub: {reason_of(error)}",
            hint="give a local tokenizer.json or its folder, or use --tokenizer bpe or bytes",
        ) from error


def template_file(name: str) -> Path | None:
    """Returns the chat_template.jinja of repository `name`, or None.

    Older repositories have the template in their tokenizer_config.json.
    """
    from huggingface_hub import hf_hub_download  # noqa: PLC0415

    try:
        return Path(hf_hub_download(name, "chat_template.jinja"))
    except Exception:  # there is none, or no connection: the caller says what is missing
        return None


def _request(request: Callable[[Any], object]) -> None:
    """Send a request to the hub unless it is in offline mode; raises what the hub answers."""
    from huggingface_hub import HfApi, constants  # noqa: PLC0415
    from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415

    if constants.HF_HUB_OFFLINE:
        return
    try:
        request(HfApi())
    except (HfHubHTTPError, ValueError):  # an answer of the hub, or an invalid name
        raise
    except Exception as error:
        raise ConnectionError(f"there is no connection to it ({reason_of(error)})") from None


def reason_of(error: BaseException) -> str:
    """Returns the first line of a library's error message, or the type of the error."""
    for source in (error.__cause__, error):
        lines = [] if source is None else str(source).strip().splitlines()
        if lines:
            return lines[0]
    return type(error).__name__
