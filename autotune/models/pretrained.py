"""Read pretrained weights from a local folder or the Hugging Face hub.

They are read once, when a study is created. Downloads follow
https://huggingface.co/docs/huggingface_hub/guides/download
"""

import hashlib
from pathlib import Path

from autotune.errors import InvalidInput, first_line_of
from autotune.models import hugging_face
from autotune.shipped.hugging_face import HuggingFaceModel
from autotune.spec.model_file import WEIGHT_FILES, no_weights, weight_files
from autotune.spec.user_code import sha256_of
from autotune.spec.weight_files import check_weight_files
from autotune.spec.workload import Workload

_ADAPTER = "adapter_config.json"


def read_pretrained(workload: Workload) -> HuggingFaceModel:
    """Returns the model with its trained weights in float32. Raises InvalidInput."""
    return hugging_face.build(workload, weights_folder=_folder(workload))


def weights_sha256(workload: Workload) -> str:
    """Returns a SHA-256 over the weight files, in the order of their names. Raises InvalidInput."""
    digests = (sha256_of(file) for file in weight_files(_folder(workload)))
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _folder(workload: Workload) -> Path:
    """Returns the folder of the weights, downloaded if necessary."""
    assert workload.model_source is not None
    local = Path(workload.model_source)
    folder = local if local.is_dir() else _downloaded(workload.model_source)
    if not weight_files(folder):
        raise no_weights(workload.model_source)
    check_weight_files(folder)
    if (folder / _ADAPTER).exists():
        # transformers would load another model, which that file names, or the adapter as well.
        raise InvalidInput(
            f"{workload.model_source} has an {_ADAPTER}: it is an adapter of another model",
            hint="merge it into its model with peft's merge_and_unload, save that with "
            "save_pretrained, and name the folder",
        )
    return folder


def _downloaded(name: str) -> Path:
    # A quarter of a second, which only models of the hub need.
    from huggingface_hub import snapshot_download  # noqa: PLC0415

    try:
        for kind in WEIGHT_FILES:
            folder = Path(snapshot_download(name, allow_patterns=["*.json", kind]))
            if any(folder.glob(kind)):
                break
        return folder
    except Exception as error:  # network and hub raise many types
        raise InvalidInput(
            f"the weights of {name} cannot be downloaded: {first_line_of(error)}",
            hint="download them on a machine with a network, and name the folder with --model",
        ) from error
