"""No technique changes what outlives a trial: names, classes, checkpoints, copies and pickles.

For every value of every technique that a script's model may get, and models in many forms.
"""

import copy
import functools
import gc
import io
import pickle
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from autotune.errors import IllegalConfiguration
from autotune.shipped.blocks import find_blocks
from autotune.shipped.compiling import compile_in_place
from autotune.shipped.granularity import recompute_in_blocks
from autotune.shipped.recomputed_state import RecomputedForward
from autotune.shipped.segments import recompute_segments
from autotune.spec.config import CHOICES, OF_SEVERAL_DEVICES, SELECTIVE, TrainingConfig
from autotune.techniques import wrap_blocks
from autotune.techniques.user_training import apply_to_user_model, parts_of_user_model
from tests.techniques.model_forms import (
    FORMS,
    KNOWN,
    LAYERS,
    VOCABULARY,
    WIDTH,
    Block,
    Model,
    NormalizedBlock,
    own_model,
)

OF_OTHER_TESTS = (*OF_SEVERAL_DEVICES, "engine", "micro_batch_size", "optimizer", "adapter")
"""Techniques that change no module of a script."""
OF_THE_PROCESS = ("attention", "allocator", "memory_budget")
"""Techniques that are a setting of the process, and change no module either."""
TOKENS = torch.arange(16).view(2, 8) % VOCABULARY


def configurations():
    """Every value of every technique; those that compile also with every checkpointing."""
    for field, values in CHOICES.items():
        if field not in (*OF_OTHER_TESTS, *OF_THE_PROCESS):
            yield from ({field: value} for value in values)
    for scope in ("block", "model"):
        for value in CHOICES["checkpointing"][1:]:
            yield {"compile": scope, "checkpointing": value}
    yield {"precision": "bf16-mixed", "checkpointing": "block", "activation_offload": "cpu"}
    yield {"precision": "bf16-mixed", "checkpointing": "attention", "compile": "block"}


CONFIGURATIONS = {
    " ".join(f"{field} {value}" for field, value in values.items()): TrainingConfig(**values)
    for values in configurations()
}
EAGER = {name: config for name, config in CONFIGURATIONS.items() if config.compile == "none"}
MANY_AT_ONCE = TrainingConfig(
    precision="bf16-mixed", checkpointing="block", activation_offload="cpu"
)
COMPILED_TOO = TrainingConfig(precision="bf16-mixed", checkpointing="attention", compile="block")
BLOCKS = TrainingConfig(checkpointing="block")
OTHERWISE_COMPILED = ("compiled_wrapper", "compiled_in_place")
"""In a plain run, `compiled_blocks` stands for the forms that the script itself compiles."""


def pairs(configurations):
    """Every form with every configuration; those that a plain run leaves out are slow."""
    several_at_once = {MANY_AT_ONCE, COMPILED_TOO} & set(configurations.values()) or {BLOCKS}
    for form in FORMS:
        for name, config in configurations.items():
            is_plain = config in several_at_once and form not in OTHERWISE_COMPILED
            marks = () if is_plain or form == "own_model" else pytest.mark.slow
            yield pytest.param(form, config, marks=marks, id=f"{form}-{name}")


@functools.cache
def plain_form(form):
    torch.manual_seed(0)
    return FORMS[form]()


def applied(form, config):
    """Returns a model of that form with the configuration; skip what the script cannot have."""
    torch.manual_seed(0)
    model = FORMS[form]()
    parts = parts_of_user_model(model)
    blocks = [] if parts.blocks_owner is None else list(parts.blocks)
    try:
        if config.checkpointing == "sqrt":  # not for scripts, whose calls of blocks are not known
            if len(set(blocks)) < LAYERS:
                pytest.skip("one block is called several times")
            parts = copy.copy(parts)
            object.__setattr__(parts, "blocks_are_called_alike", True)
            wrap_blocks(parts, config)
        else:
            apply_to_user_model(config, model)
    except IllegalConfiguration as error:
        pytest.skip(str(error))
    if (form, config.precision) == ("batch_norm", "bf16-true"):
        pytest.skip("torch's batch norm takes no weights in bf16 beside statistics in float32")
    return model


def names_of(model):
    return {
        "state_dict": list(model.state_dict()),
        "parameters": [name for name, _ in model.named_parameters()],
        "buffers": [name for name, _ in model.named_buffers()],
        "modules": [name for name, _ in model.named_modules()],
    }


def output_of(model):
    torch.manual_seed(1)
    output = model(TOKENS)
    return getattr(output, "logits", output)


def gradients_of(model):
    model.zero_grad()
    output_of(model).float().square().mean().backward()
    return {
        name: None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (value is None) == (other[name] is None), name
        assert value is None or torch.equal(value, other[name]), name


def assert_same_gradients(one, other):
    """Compare but for the rounding of sums, which depends on the processor and on alignment."""
    assert one.keys() == other.keys()
    largest = max(float(value.abs().max()) for value in other.values() if value is not None)
    for name, value in one.items():
        assert (value is None) == (other[name] is None), name
        if value is not None:
            rounding = 1e-5 * float(other[name].abs().max()) + 1e-9 * largest
            torch.testing.assert_close(value, other[name], rtol=0, atol=rounding, msg=name)


def can(function, *args):
    try:
        function(*args)
    except Exception:
        return False
    return True


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


def unpickled(data):
    return torch.load(io.BytesIO(data), weights_only=False)


# -- names and classes -----------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "config"), pairs(CONFIGURATIONS))
def test_names_and_classes_are_those_of_the_plain_model(form, config):
    plain, model = plain_form(form), applied(form, config)
    assert names_of(model) == names_of(plain)
    for name, module in plain.named_modules():
        changed = model.get_submodule(name)
        assert isinstance(changed, type(module)), name
        for attribute in ("__name__", "__module__", "__qualname__", "__doc__"):
            assert getattr(type(changed), attribute) == getattr(type(module), attribute)


@pytest.mark.parametrize("make_list", [nn.ModuleList, lambda blocks: nn.Sequential(*blocks)])
def test_blocks_are_found_again_when_some_are_recomputed(make_list):
    owner = nn.Module()
    owner.layers = make_list([nn.TransformerEncoderLayer(8, 2, 8) for _ in range(LAYERS)])
    recompute_in_blocks(list(owner.layers), "every-2", attention_name=None)
    assert find_blocks(owner).blocks is owner.layers


def test_a_registry_of_subclasses_keeps_its_classes():
    before = dict(KNOWN)
    applied("registered", CONFIGURATIONS["precision bf16-mixed"])
    applied("registered", CONFIGURATIONS["checkpointing block"])
    assert before == KNOWN


@pytest.mark.parametrize("value", CHOICES["checkpointing"])
def test_the_config_of_a_transformers_model_is_left_alone(value):
    model = applied("llama", TrainingConfig(checkpointing=value))
    gradients_of(model)
    assert model.config.to_dict() == plain_form("llama").config.to_dict()


@pytest.mark.parametrize("config", CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_weights_load_in_both_directions(config):
    plain, model = own_model(), applied("own_model", config)
    model.load_state_dict(plain.state_dict())
    plain.load_state_dict(model.state_dict())


# -- copies and pickles ----------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "config"), pairs(EAGER))
def test_a_copy_computes_the_same_with_weights_of_its_own(form, config):
    if not can(copy.deepcopy, plain_form(form)):
        pytest.skip("cannot be copied without autotune either")
    model = applied(form, config)
    copied = copy.deepcopy(model)
    assert names_of(copied) == names_of(model)
    assert_same_gradients(gradients_of(copied), gradients_of(model))
    with torch.no_grad():
        expected = output_of(model).clone()
        for parameter in copied.parameters():
            parameter.zero_()
        assert torch.equal(output_of(model), expected)
        assert not torch.equal(output_of(copied), expected)


@pytest.mark.parametrize(("form", "config"), pairs(CONFIGURATIONS))
def test_a_pickle_holds_the_plain_model(form, config):
    plain = plain_form(form)
    if not can(pickled, plain):
        pytest.skip("cannot be pickled without autotune either")
    model = applied(form, config)
    if config.compile == "none":
        gradients_of(model)  # what a step leaves in the modules
    data = pickled(model)
    assert b"autotune" not in data
    loaded = unpickled(data)
    assert names_of(loaded) == names_of(plain)
    assert [type(module) for module in loaded.modules()] == [type(m) for m in plain.modules()]
    assert_equal(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_of_pickle_works(protocol):
    model = applied("own_model", CONFIGURATIONS["checkpointing block"])
    loaded = pickle.loads(pickle.dumps(model, protocol=protocol))
    assert_equal(loaded.state_dict(), model.state_dict())


@pytest.mark.slow
def test_a_whole_model_loads_where_autotune_is_not_installed(tmp_path):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(layer, copy.deepcopy(layer)))
    config = TrainingConfig(precision="bf16-mixed", checkpointing="block", compile="block")
    apply_to_user_model(config, model)
    torch.save(model, tmp_path / "model.pt")
    program = """
        import sys
        sys.modules["autotune"] = None
        import torch
        model = torch.load("model.pt", weights_only=False)
        model(torch.ones(1, 3, 16)).sum().backward()
        print(*(type(module).__name__ for module in model[1]))
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == ["TransformerEncoderLayer"] * 2


# -- the same training -----------------------------------------------------------------------------

RECOMPUTING = {
    value: TrainingConfig(checkpointing=value)
    for value in CHOICES["checkpointing"]
    if value != "none"
}


@pytest.mark.parametrize(("form", "config"), pairs(RECOMPUTING))
def test_recomputed_blocks_have_the_gradients_of_the_plain_model(form, config):
    torch.manual_seed(0)
    plain = FORMS[form]()
    model = applied(form, config)
    for _ in range(2):
        assert_same_gradients(gradients_of(model), gradients_of(plain))
        assert_equal(dict(model.named_buffers()), dict(plain.named_buffers()))


# -- buffers and attributes that forward changes ---------------------------------------------------


class Counted(Block):
    """Counts its calls in a buffer, in place, and uses the count."""

    def __init__(self):
        super().__init__()
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return super().forward(x) * (1 + 0.1 * self.count)


class CountedByAnother(Counted):
    """Replaces the buffer by another one."""

    def forward(self, x):
        self.count = self.count + 1
        return Block.forward(self, x) * (1 + 0.1 * self.count)


class CountedInPython(Block):
    def __init__(self):
        super().__init__()
        self.count, self.seen, self.by_name = 0, [], {}

    def forward(self, x):
        self.count += 1
        self.seen.append(self.count)
        self.by_name["last"] = self.count
        return super().forward(x) * (1 + 0.1 * self.count + 0.1 * len(self.seen))


class Averaged(Block):
    """Keeps a moving average by `.data`, which makes no new version of the tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.ones(WIDTH), persistent=False)

    def forward(self, x):
        self.average.data.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return super().forward(x) * self.average.clone()


class PowerIterated(Block):
    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.mlp[0])


class HeldByAttention(Block):
    def __init__(self):
        super().__init__()
        self.attention.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.attention.register_forward_pre_hook(_count_call)


def _count_call(attention, _inputs):
    attention.calls.add_(1)


class WithLoss(Block):
    """Leaves a loss of its own to the model."""

    def forward(self, x):
        self.loss = x.square().mean()
        return super().forward(x)


STATEFUL = (
    NormalizedBlock,
    Counted,
    CountedByAnother,
    CountedInPython,
    Averaged,
    PowerIterated,
    HeldByAttention,
    WithLoss,
)


def trained(model, *, passes, backward_passes=1):
    """Returns losses, gradients, and the state that forward has changed, after three steps."""
    losses = []
    for step in range(3):
        model.train(step != 1)
        total = torch.zeros(())
        for _ in range(passes):  # all before the first backward pass
            output = output_of(model)
            loss = output.square().mean()
            total = total + loss + sum(getattr(block, "loss", 0.0) for block in model.blocks)
        for index in range(backward_passes):
            total.backward(retain_graph=index + 1 < backward_passes)
        losses.append(float(total))
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    counts = [
        (vars(block).get("count"), vars(block).get("seen"), vars(block).get("by_name"))
        for block in model.blocks
    ]
    return losses, gradients, dict(model.named_buffers()), counts


def assert_state_is_changed_once(block, value, **schedule):
    torch.manual_seed(0)
    plain = Model(block)
    torch.manual_seed(0)
    model = recomputed_model(block, value)
    (losses, gradients, buffers, counts), expected = (
        trained(one, **schedule) for one in (model, plain)
    )
    assert losses == expected[0]
    assert_same_gradients(gradients, expected[1])
    assert_equal(buffers, expected[2])
    assert counts == expected[3]


def recomputed_model(block, value):
    model = Model(block)
    if value == "sqrt":
        recompute_segments(list(model.blocks))
    else:
        recompute_in_blocks(list(model.blocks), value, attention_name="attention")
    return model


@pytest.mark.parametrize("value", ["block", "sqrt"])
@pytest.mark.parametrize("block", STATEFUL)
def test_what_forward_changes_is_changed_once_a_pass(block, value):
    assert_state_is_changed_once(block, value, passes=1)


@pytest.mark.slow
@pytest.mark.parametrize("value", RECOMPUTING)
@pytest.mark.parametrize("block", STATEFUL)
def test_what_forward_changes_is_changed_once_for_every_granularity(block, value):
    # A graph of them can be used once.
    backward_passes = 1 if value in SELECTIVE else 2
    assert_state_is_changed_once(block, value, passes=2, backward_passes=backward_passes)


def test_each_recomputation_finds_the_state_of_its_own_forward_pass():
    assert_state_is_changed_once(Counted, "block", passes=3, backward_passes=2)


def test_buffers_that_forward_leaves_alone_are_kept_nowhere():
    class WithTable(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.ones(WIDTH))

        def forward(self, x):
            return super().forward(x) * self.table

    model = recomputed_model(WithTable, "block")
    gradients_of(model)
    block = model.blocks[0]
    output = block(torch.ones(1, 2, WIDTH, requires_grad=True))
    (passed,) = (
        one
        for one in gc.get_objects()
        if type(one) is RecomputedForward and one.modules == (block,)
    )
    assert passed._before == []
    assert output.requires_grad


def test_a_buffer_that_changes_only_in_some_passes_ends_in_a_sentence():
    class Seldom(Counted):
        def forward(self, x):
            return super().forward(x) if x.shape[0] == 2 else Block.forward(self, x)

    block = Seldom()
    recompute_in_blocks([block], "block", attention_name=None)
    block(torch.ones(1, 2, WIDTH))
    with pytest.raises(RuntimeError, match="Seldom changes a buffer in some of its forward passes"):
        block(torch.ones(2, 2, WIDTH))


def test_a_model_that_reads_what_is_between_blocks_gets_it_from_segments():
    class Tapped(Model):
        def forward(self, tokens):
            x, seen = self.embedding(tokens), 0.0
            for block in self.blocks:
                x = block(x)
                seen = seen + x
            return self.head(seen)

    torch.manual_seed(0)
    plain = Tapped()
    torch.manual_seed(0)
    model = Tapped()
    recompute_segments(list(model.blocks))
    expected = gradients_of(plain)
    for name, gradient in gradients_of(model).items():  # they are added up in another order
        assert torch.allclose(gradient, expected[name], atol=1e-6), name


def test_a_block_that_gets_another_input_than_its_segment_gave_it_runs_by_itself():
    class Skipping(Model):
        def forward(self, tokens):
            x = self.embedding(tokens)
            for index, block in enumerate(self.blocks):
                x = block(x) if index % 2 == 0 else block(2 * x)
            return self.head(x)

    torch.manual_seed(0)
    plain = Skipping()
    torch.manual_seed(0)
    model = Skipping()
    recompute_segments(list(model.blocks))
    assert_same_gradients(gradients_of(model), gradients_of(plain))


def test_a_compiled_block_that_recomputes_with_a_changed_buffer_ends_in_a_sentence():
    block = PowerIterated()
    recompute_in_blocks([block], "block", attention_name=None)
    compile_in_place(block)
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(RuntimeError, match="PowerIterated changes a buffer in place"),
    ):
        block(torch.ones(1, 2, WIDTH))
