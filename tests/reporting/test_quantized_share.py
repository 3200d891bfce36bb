"""How many weights quantization leaves in 16 bits is in every text about a trial."""

import dataclasses
import io
import json

from rich.console import Console

from autotune.cli.tables import print_trials
from autotune.reporting.plain_tables import csv_text
from autotune.reporting.report.details import trial_details
from autotune.reporting.report.facts import workload_facts
from autotune.reporting.trial_text import full_hover
from autotune.service.pages.contexts import trial_page
from autotune.spec.config import TrainingConfig
from autotune.spec.reading import parse
from autotune.spec.result import Measurement
from autotune.spec.workload import make_workload
from tests.building.results import record, study_result

QLORA = TrainingConfig(precision="bf16-mixed", adapter="lora", base_weights="nf4")
QUANTIZED = record(1, config=QLORA, unquantized_share=0.973)
LEFT = "97 % of the weights in 16 bits"


def test_the_share_is_in_every_text_about_a_trial():
    result = study_result([record(0), QUANTIZED])
    table = io.StringIO()
    print_trials(Console(file=table, width=200), result, result.trials)
    assert " ".join(table.getvalue().split()).count(LEFT) == 1
    assert dict(trial_page(result, 1).measured)["weights"] == LEFT
    assert "weights" not in dict(trial_page(result, 0).measured)
    assert trial_details(result)["facts"]["weights"]["values"] == ["", LEFT]
    assert LEFT in full_hover(QUANTIZED, None).replace("<br>", " ")
    assert json.loads(json.dumps(QUANTIZED.to_dict()))["unquantized_share"] == 0.973
    assert ",0.973," in csv_text(result)


def test_a_measurement_from_before_the_share_was_counted_has_none():
    older = dataclasses.asdict(Measurement(outcome="ok"))
    del older["unquantized_share"]
    assert parse(Measurement, older).unquantized_share is None


def test_a_report_names_a_quantization_of_the_model_that_is_not_used(tmp_path):
    file = tmp_path / "config.json"
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    quantization = {"quant_method": "bitsandbytes"}
    content = {"model_type": "llama", "vocab_size": 256, **sizes}
    file.write_text(json.dumps({**content, "quantization_config": quantization}))
    workload = make_workload("cpu", {"model": str(file)})
    facts = dict(workload_facts(workload))
    assert "(bitsandbytes) is not used" in facts["not used"]
