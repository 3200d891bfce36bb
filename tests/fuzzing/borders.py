"""Every border where autotune reads what others wrote, by its name."""

from collections.abc import Mapping

from tests.fuzzing.borders_of_data import DATASET
from tests.fuzzing.borders_of_databases import IMPORT_FILE, OTHER_ROWS, OUTBOX, STUDY_ROW, TRIAL_ROW
from tests.fuzzing.borders_of_models import MODEL_CONFIG, TOKENIZER, USERS_CODE, WEIGHTS
from tests.fuzzing.borders_of_network import QUERY, SERVER_ANSWER, SUBMISSION
from tests.fuzzing.borders_of_spaces import DEFAULTS, PUBLISHED_TABLE, SPACE_FILE
from tests.fuzzing.borders_of_trainers import TRAINER_FILE
from tests.fuzzing.borders_of_trials import REPLY
from tests.fuzzing.judging import Border

BORDERS: Mapping[str, Border] = {
    "search space": SPACE_FILE,
    "study row": STUDY_ROW,
    "trial row": TRIAL_ROW,
    "other rows": OTHER_ROWS,
    "import file": IMPORT_FILE,
    "reply of a trial": REPLY,
    "result in an outbox": OUTBOX,
    "published table": PUBLISHED_TABLE,
    "autotune.toml": DEFAULTS,
    "dataset": DATASET,
    "config.json": MODEL_CONFIG,
    "weights": WEIGHTS,
    "tokenizer": TOKENIZER,
    "code of a model": USERS_CODE,
    "submission": SUBMISSION,
    "query": QUERY,
    "answer of a server": SERVER_ANSWER,
    "file of a trainer": TRAINER_FILE,
}
