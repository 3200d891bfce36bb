"""`autotune studies trust`: let the code that a study names run on this machine."""

import typer

from autotune.cli.database import open_store
from autotune.cli.lines import print_line
from autotune.cli.options import OfStudy, storage_of
from autotune.errors import StorageUnavailable


def trust(context: typer.Context, request: OfStudy) -> None:
    """Let the script or the Python model of a study run on this machine.

    A study that was imported, or is in a shared database, can name any code. Look at it first.
    """
    # Both import SQLAlchemy, which takes 0.3 s; the help of this command does without.
    from autotune.storage.identity import work_folder_path  # noqa: PLC0415
    from autotune.study.opening import trusted_code  # noqa: PLC0415

    study = request.study
    with open_store(storage_of(context, request.storage)) as store:
        definition, _ = store.definition(study)
        workload = definition.workload
        code = trusted_code.code_of(workload)
        if code is None:
            print_line(f"study {study} runs no code of a file")
            return
        folder = work_folder_path(store.database) / study
        trusted_code.trust(workload, folder=folder)
    if not trusted_code.is_trusted(workload, folder):
        raise StorageUnavailable(
            f"the file system of {folder} does not say whose a file is, so that the note about the "
            "code does not count",
            hint="name the code in each command instead: autotune search with --script or --model",
        )
    print_line(f"study {study} may run {code} here")
    print_line(f"its file has the SHA-256 {workload.model_sha256}")
