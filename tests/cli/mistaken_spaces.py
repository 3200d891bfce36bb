"""Search-space files that must be rejected, by the key they are wrong in."""

from autotune.spec.config import TECHNIQUES

_CONFIGURATION = '[[configurations]]\nname = "a"\n'
_REFERENCE = 'source = "s"\nmeasured_on = "m"\ncontrol = "a"\n'
_ROWS = "[reference.rows]\n"


def _reference(lines: str, rows: str = "a = { perplexity = 2 }") -> str:
    return f"{_CONFIGURATION}[reference]\n{_REFERENCE}{lines}\n{_ROWS}{rows}\n"


def _without(line: str) -> str:
    return _reference("").replace(line, "")


def _technique(line: str) -> str:
    return f"[techniques]\n{line}\n"


def _condition(line: str) -> str:
    return (
        f'[techniques]\ncompile = ["none", "model"]\nprecision = ["fp32"]\n[[conditions]]\n{line}\n'
    )


def _workload(line: str) -> str:
    return f"[workload]\n{line}\n{_CONFIGURATION}"


SPACES: dict[str, str | bytes] = {
    # -- the file itself: a key is where the mistake is, then which
    "file/empty": "",
    "file/only a comment": "# nothing",
    "file/zero byte": "description = 'a'\0",
    "file/latin 1": 'description = "caf\xe9"'.encode("latin-1"),
    "file/utf 16": _technique('precision = ["fp32"]').encode("utf-16"),
    "file/lone carriage return": 'description = "a"\r[techniques]\r',
    "file/a key twice": 'description = "a"\ndescription = "b"\n',
    "file/a table twice": _technique('precision = ["fp32"]') * 2,
    "file/half a line": "[techniques]\nprecision = [",
    "file/json": '{"techniques": {}}',
    "file/endless number": f"description = {'9' * 5000}",
    "file/nested": f"description = {'[' * 20000}",
    "file/many parts": f"{'.'.join(['a'] * 20_000)} = 1",
    "file/no such day": "description = 2024-02-30",
    "file/unknown key": 'describtion = "a"',
    "file/unknown table": "[technique]\n",
    "file/escape codes": '"\\u001b[31m\\nerror: x" = 1',
    "description": "description = 3",
    "description/list": 'description = ["a"]',
    "extends": "extends = 3",
    "extends/empty": 'extends = ""',
    "extends/nowhere": 'extends = "nowhere.toml"',
    "extends/zero byte": 'extends = "a\\u0000.toml"',
    "extends/list": 'extends = ["default"]',
    "extends/folder": 'extends = "../folder"',
    "techniques": 'techniques = ["precision"]',
    "techniques/none": "[techniques]\n",
    "techniques/text": 'techniques = "all"',
    "techniques/unknown": _technique('precison = ["fp32"]'),
    **{f"techniques.{name}": _technique(f'{name} = ["nonesuch"]') for name in TECHNIQUES},
    "techniques.precision/text": _technique('precision = "fp32"'),
    "techniques.precision/of scripts": _technique('precision = ["fp64"]'),
    "techniques.precision/none": _technique("precision = []"),
    "techniques.precision/twice": _technique('precision = ["fp32", "fp32"]'),
    "techniques.precision/number": _technique("precision = [32]"),
    "techniques.precision/nested": _technique('precision = [["fp32"]]'),
    "techniques.precision/range": _technique("precision = { from = 1, to = 2, step = 1 }"),
    "techniques.precision/day": _technique("precision = [2024-01-01]"),
    "techniques.checkpointing/bool": _technique("checkpointing = [true]"),
    "techniques.attention/second": _technique('attention = ["auto", "fast"]'),
    "techniques.activation_budget/number": _technique("activation_budget = [1.5]"),
    "techniques.activation_budget/twice": _technique('activation_budget = ["1GiB", "1024MiB"]'),
    "techniques.activation_budget/range": _technique(
        "activation_budget = { from = 1, to = 2, step = 1 }"
    ),
    "techniques.adapter_rank/zero": _technique("adapter_rank = [0]"),
    "techniques.adapter_rank/half": _technique("adapter_rank = [1.5]"),
    "techniques.adapter_rank/range": _technique(
        'adapter = ["lora"]\nadapter_rank = { from = 1, to = 2, step = 0.5 }'
    ),
    "techniques.sharding/pipeline": _technique('sharding = ["pipeline"]'),
    "techniques.sharding_group/zero": _technique("sharding_group = [0]"),
    "techniques.tensor_parallel/half": _technique("tensor_parallel = [1.5]"),
    "workload.devices_per_trial": _workload("devices_per_trial = 0"),
    "workload.devices_per_trial/uneven": _workload("devices_per_trial = 3"),
    "workload.nodes_per_trial": _workload("nodes_per_trial = 2"),
    "techniques.memory_budget/above": _technique("memory_budget = [1.5]"),
    "techniques.memory_budget/nan": _technique("memory_budget = [nan]"),
    "techniques.memory_budget/bool": _technique("memory_budget = [true]"),
    "techniques.memory_budget/text": _technique('memory_budget = ["0.5"]'),
    "techniques.memory_budget/alone": _technique("memory_budget = 0.5"),
    "techniques.memory_budget.from": _technique("memory_budget = { to = 1.0, step = 0.1 }"),
    "techniques.memory_budget.from/below": _technique(
        "memory_budget = { from = -1, to = 1.0, step = 0.5 }"
    ),
    "techniques.memory_budget.to": _technique(
        "memory_budget = { from = 0.5, to = 0.1, step = 0.1 }"
    ),
    "techniques.memory_budget.to/endless": _technique(
        f"memory_budget = {{ from = 0, to = {'9' * 400}, step = 1 }}"
    ),
    "techniques.memory_budget.to/infinite": _technique(
        "memory_budget = { from = 0, to = inf, step = 1 }"
    ),
    "techniques.memory_budget.step": _technique(
        "memory_budget = { from = 0.1, to = 1.0, step = 0 }"
    ),
    "techniques.memory_budget.step/nan": _technique(
        "memory_budget = { from = 0.1, to = 1.0, step = nan }"
    ),
    "techniques.memory_budget.step/tiny": _technique(
        "memory_budget = { from = 0, to = 1.0, step = 1e-300 }"
    ),
    "techniques.memory_budget/other key": _technique(
        "memory_budget = { from = 0, to = 1, by = 0.1 }"
    ),
    "techniques.micro_batch_size/text": _technique('micro_batch_size = "all"'),
    "techniques.micro_batch_size/zero": _technique("micro_batch_size = [0]"),
    "techniques.micro_batch_size/float": _technique("micro_batch_size = [1.0]"),
    "techniques.micro_batch_size/range": _technique(
        "micro_batch_size = { from = 1.0, to = 4, step = 1 }"
    ),
    "techniques.micro_batch_size/none divides": _technique("micro_batch_size = [7]"),
    "techniques.micro_batch_size/endless": _technique(f"micro_batch_size = [{'9' * 4000}]"),
    "conditions": "conditions = 1",
    "conditions/table": "[conditions]\nif = 1",
    "conditions/unknown key": _condition('when = { compile = ["model"] }'),
    "conditions.if": _condition('then = { compile = ["model"] }'),
    "conditions.if/empty": _condition('if = {}\nthen = { compile = ["model"] }'),
    "conditions.if/list": _condition('if = ["compile"]\nthen = { compile = ["model"] }'),
    "conditions.if/unknown technique": _condition(
        'if = { compil = "model" }\nthen = { compile = ["model"] }'
    ),
    "conditions.if/unknown value": _condition(
        'if = { compile = ["all"] }\nthen = { precision = ["fp32"] }'
    ),
    "conditions.if/value not listed": _condition(
        'if = { compile = ["block"] }\nthen = { precision = ["fp32"] }'
    ),
    "conditions.if/not varied": _condition(
        'if = { loss = ["full"] }\nthen = { precision = ["fp32"] }'
    ),
    "conditions.then": _condition('if = { compile = ["model"] }'),
    "conditions.then/empty list": _condition(
        'if = { compile = ["model"] }\nthen = { precision = [] }'
    ),
    "conditions.then/value not listed": _condition(
        'if = { compile = ["model"] }\nthen = { precision = ["tf32"] }'
    ),
    "conditions.then/contradiction": '[techniques]\ncompile = ["none"]\n'
    'precision = ["fp32", "tf32"]\n'
    '[[conditions]]\nif = { precision = ["fp32", "tf32"] }\nthen = { precision = ["tf32"] }\n'
    '[[conditions]]\nif = { precision = ["tf32"] }\nthen = { precision = ["fp32"] }\n',
    "defaults": 'defaults = "adamw"',
    "defaults/unknown": f"[defaults]\nspeed = 1\n{_CONFIGURATION}",
    "defaults/unknown value": f'[defaults]\noptimizer = "adam"\n{_CONFIGURATION}',
    "defaults/list": f'[defaults]\noptimizer = ["adamw"]\n{_CONFIGURATION}',
    "configurations": "configurations = 1",
    "configurations/texts": 'configurations = ["a"]',
    "configurations/table": '[configurations]\nname = "a"',
    "configurations.name": '[[configurations]]\nprecision = "fp32"',
    "configurations.name/empty": '[[configurations]]\nname = ""',
    "configurations.name/number": "[[configurations]]\nname = 1",
    "configurations.name/twice": _CONFIGURATION * 2,
    "configurations/unknown": f"{_CONFIGURATION}steps = 3",
    "configurations/unknown value": f'{_CONFIGURATION}compile = "fast"',
    "configurations/illegal": f"{_CONFIGURATION}memory_budget = 0.5",
    "workload": "workload = 3",
    "workload/unknown": _workload("step = 3"),
    "workload.model": _workload('model = "nope"'),
    "workload.model/number": _workload("model = 3"),
    "workload.model/code": _workload('model = "own.py:build"'),
    "workload.own_config": _workload("own_config = { precision = 3 }"),
    "workload.own_file": _workload("own_file = 3"),
    "workload.pretrained": _workload("pretrained = 1"),
    "workload.layers": _workload("layers = 0"),
    "workload.layers/endless": _workload(f"layers = {'9' * 4000}"),
    "workload.width": _workload("width = 130.0"),
    "workload.heads": _workload('heads = "4"'),
    "workload.feed_forward_width": _workload("feed_forward_width = -1"),
    "workload.vocab_size": _workload("vocab_size = true"),
    "workload.dataset": _workload('dataset = ""'),
    "workload.dataset/list": _workload('dataset = ["a.txt"]'),
    "workload.dataset/zero byte": _workload('dataset = "./a\\u0000b.txt"'),
    "workload.dataset_config": _workload("dataset_config = 3"),
    "workload.dataset_split": _workload("dataset_split = false"),
    "workload.held_out_split": _workload("held_out_split = 0.1"),
    "workload.streaming": _workload("streaming = 1"),
    "workload.text_column": _workload("text_column = 1"),
    "workload.prompt_format": _workload('prompt_format = "alpca"'),
    "workload.tokenizer": _workload("tokenizer = 5"),
    "workload.tokenizer/zero byte": _workload('tokenizer = "a\\u0000.json"'),
    "workload.packing": _workload('packing = "tight"'),
    "workload.sequence_length": _workload("sequence_length = inf"),
    "workload.global_batch": _workload("global_batch = 0"),
    "workload.steps": _workload("steps = 2024-01-01"),
    "workload.steps/few": _workload("steps = 5"),
    "workload.warmup_steps": _workload("warmup_steps = 0"),
    "workload.evaluation_sequences": _workload("evaluation_sequences = []"),
    "workload.adapter_dropout": _workload("adapter_dropout = 1"),
    "workload.adapter_dropout/no adapter": _workload("adapter_dropout = 0.05"),
    "workload.adapter_alpha": _workload("adapter_alpha = 0.5"),
    "workload.adapter_scaling": _workload('adapter_scaling = "root"'),
    "workload.adapter_init": _workload("adapter_init = true"),
    "workload.adapter_rank_pattern": _workload('adapter_rank_pattern = "q_proj=4"'),
    "workload.adapter_rank_pattern/flags": _workload('adapter_rank_pattern = { "(?i)q" = 4 }'),
    "workload.adapter_alpha_pattern": _workload("adapter_alpha_pattern = { q_proj = -1 }"),
    "workload.modules_to_save": _workload('modules_to_save = ["lm head"]'),
    "workload.modules_to_save/number": _workload("modules_to_save = [3]"),
    "workload.modules_to_save/no adapter": _workload('modules_to_save = ["head"]'),
    "workload.modules_to_save_dtype": _workload('modules_to_save_dtype = "bf16"'),
    "workload.seed": _workload("seed = -1"),
    "workload.learning_rates": _workload("learning_rates = 0.1"),
    "workload.learning_rates/unknown": _workload("learning_rates = { adam = 0.1 }"),
    "workload.learning_rates/nan": _workload("learning_rates = { adamw = nan }"),
    "workload.learning_rates/endless": _workload(f"learning_rates = {{ adamw = {'9' * 400} }}"),
    "workload.learning_rates/text": _workload('learning_rates = { adamw = "1e-3" }'),
    "workload.schedule": _workload('schedule = "linear"'),
    "workload.learning_rate_warmup_steps": _workload("learning_rate_warmup_steps = 0"),
    "workload.gradient_clipping": _workload("gradient_clipping = 0"),
    "workload.gradient_clipping/endless": _workload(f"gradient_clipping = {'9' * 400}"),
    "scales": f"scales = 3\n{_CONFIGURATION}",
    "scales/number": f"{_CONFIGURATION}[scales]\ntiny = 3",
    "scales/unknown": f"{_CONFIGURATION}[scales.tiny]\nsize = 3",
    "scales/value": f"{_CONFIGURATION}[scales.tiny]\nlayers = 0",
    "reference": f"reference = 3\n{_CONFIGURATION}",
    "reference/unknown": _reference("torsh = 1"),
    "reference.source": _without('source = "s"'),
    "reference.measured_on": _without('measured_on = "m"'),
    "reference.torch": _reference("torch = 2.8"),
    "reference.torch/word": _reference('torch = "newest"'),
    "reference.control": _without('control = "a"'),
    "reference.control/not a name": _without('control = "a"').replace(
        _ROWS, f'control = "b"\n{_ROWS}'
    ),
    "reference.rows": f"{_CONFIGURATION}[reference]\n{_REFERENCE}",
    "reference.rows/not a name": _reference("", "b = { perplexity = 2 }"),
    "reference.rows/number": _reference("", "a = 2"),
    "reference.rows/unknown": _reference("", "a = { speed = 2 }"),
    "reference.rows.peak_memory": _reference("", "a = { peak_memory = 3 }"),
    "reference.rows.peak_memory/unit": _reference("", 'a = { peak_memory = "8,5GiB" }'),
    "reference.rows.tokens_per_second": _reference("", "a = { tokens_per_second = 0 }"),
    "reference.rows.tokens_per_second/endless": _reference(
        "", f"a = {{ tokens_per_second = {'9' * 400} }}"
    ),
    "reference.rows.perplexity": _reference("", "a = { perplexity = nan }"),
}
"""{key of the file, and after a slash which of several mistakes: content of the file}"""


def space_file(name: str) -> str:
    return f"spaces/{list(SPACES).index(name)}.toml"
