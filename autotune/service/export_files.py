"""An export of a trial as a zip file, or as its texts, without writing anything."""

import io
import zipfile
from typing import Any

from autotune.exporters.written import WrittenExport
from autotune.service.answers import Answer, json_answer
from autotune.spec.result import StudyResult
from autotune.spec.user_paths import path_exists
from autotune.spec.workload import STANDARD_LIBRARY_TEXT

ZIP = "application/zip"

_NOT_PATHS = (STANDARD_LIBRARY_TEXT, "bytes", "bpe")

_WRITTEN_AT = (1980, 1, 1, 0, 0, 0)  # the first moment of the format: equal exports are equal bytes


def zipped(export: WrittenExport) -> Answer:
    """Returns the files of an export as a zip file, in a folder of the export's own."""
    name = export.folder.name
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for file, content in export.file_contents.items():
            entry = zipfile.ZipInfo(f"{name}/{file}", _WRITTEN_AT)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content)
    headers = {"Content-Disposition": f'attachment; filename="{name}.zip"'}
    return Answer(written.getvalue(), media_type=ZIP, headers=headers)


def as_texts(export: WrittenExport, result: StudyResult) -> Answer:
    """Returns the files of an export as JSON, with what a user should know about them."""
    content: dict[str, Any] = export.to_dict()
    content["files"] = [{"name": name, "text": text} for name, text in export.content.files.items()]
    content["notes"] = [*content["notes"], *_notes_on_paths(result)]
    return json_answer(content)


def _notes_on_paths(result: StudyResult) -> list[str]:
    """Returns what to know about paths in the files, which are those of the server's machine."""
    notes = []
    workload = result.workload
    paths = [
        path
        for path in (workload.dataset, workload.tokenizer)
        if path not in _NOT_PATHS and path_exists(path)
    ]
    if paths:
        notes.append(f"paths in the files are those of the server's machine: {', '.join(paths)}")
    if workload.script is not None:
        notes.append(
            f"the script {workload.script} is not among the files; the command names its folder "
            "on the server's machine, and the folder that the server would write the files to"
        )
    return notes
