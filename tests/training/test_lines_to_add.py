"""A training loop without a line of ours: the error has the lines to add, at their places."""

import re
import textwrap

import pytest

from autotune.cli import print_error
from autotune.errors import InvalidInput
from autotune.execution.tasks import Examine
from autotune.spec.workload import make_workload

PLAIN = """
import argparse
import torch
from torch import nn
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=8)
args = parser.parse_args()
net = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 64))
adam = torch.optim.AdamW(
    net.parameters(),
    lr=1e-3,
)
rows = torch.arange(256 * 17).view(256, 17) % 64
loader = DataLoader(list(rows), batch_size=args.batch)
for epoch in range(10**9):
    for batch in loader:
        logits = net(batch[:, :-1])
        error = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        adam.zero_grad()
        error.backward()
        adam.step()
"""
OF_A_CLASS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from parts import Net, make_optimizer

class Engine:
    def __init__(self, model, loader, accumulation=4):
        self.model = model
        self.loader = loader
        self.accumulation = accumulation
        self.optimizer = make_optimizer(self.model)

    def run(self):
        for epoch in range(10**9):
            for step, (x, y) in enumerate(self.loader):
                loss = nn.functional.mse_loss(self.model(x), y)
                (loss / self.accumulation).backward()
                if (step + 1) % self.accumulation == 0:
                    self.optimizer.step()
                    self.optimizer.zero_grad()

def main():
    data = TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
    Engine(Net(), DataLoader(data, batch_size=8)).run()

if __name__ == "__main__":
    main()
"""
PARTS = """
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

def make_optimizer(net):
    return torch.optim.SGD(net.parameters(), lr=1e-3)
"""
SEVERAL_OF_A_WRAPPED_MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.embedding(input_ids))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

def optimizers_of(model):
    decayed = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() <= 1]
    return [torch.optim.SGD(decayed, lr=0.1), torch.optim.AdamW(others)]

def train_step(batch):
    loss = model(**batch)
    loss.backward()
    for one in optimizers:
        one.step()
        one.zero_grad()
    return loss.item()

model = nn.DataParallel(Model())
optimizers = optimizers_of(model)
while True:
    tokens = torch.randint(64, (4, 17))
    train_step({"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]})
"""
TWO_MODELS = """
import torch
from torch import nn

maker = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 8))
critic = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
of = {name: torch.optim.Adam(each.parameters()) for name, each in
      (("maker", maker), ("critic", critic))}
for step in range(10**9):
    noise, real = torch.randn(16, 4), torch.randn(16, 8)
    made = maker(noise)
    critic_loss = critic(made.detach()).mean() - critic(real).mean()
    of["critic"].zero_grad(); critic_loss.backward(); of["critic"].step()
    maker_loss = -critic(made).mean()
    of["maker"].zero_grad(); maker_loss.backward(); of["maker"].step()
"""
OF_A_USERS_OPTIMIZER = """
import torch
from torch import nn

class Signs(torch.optim.Optimizer):
    def __init__(self, weights, rate):
        self.rate = rate
        super().__init__(weights, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.sub_(self.rate * weight.grad.sign())

def train(model, data, rate=0.1):
    optimizer = Signs(model.parameters(), rate)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for features, labels in data:
        loss = nn.functional.cross_entropy(model(features), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

train(nn.Linear(8, 3), ((torch.randn(6, 8), torch.randint(3, (6,))) for _ in range(10**9)))
"""
NOT_COME_TO = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader

def train(data):
    net = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for x, y in DataLoader(data, batch_size=4):
        loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

if len(sys.argv) > 1:
    train([])
"""
LINES = {
    PLAIN: [
        "train.py:14 after `adam = torch.optim.AdamW(`",
        "net, adam = autotune.apply(net, adam)",
        "train.py:16 before `loader = DataLoader(list(rows), batch_size=args.batch)`",
        "micro_batch = autotune.current_config(global_batch=args.batch).micro_batch_size",
        "train.py:23 after `adam.step()`",
        "autotune.report(tokens=batch[:, :-1].numel(), loss=error)",
    ],
    OF_A_CLASS: [
        "train.py:12 after `self.optimizer = make_optimizer(self.model)`",
        "self.model, self.optimizer = autotune.apply(self.model, self.optimizer)",
        "train.py:25 before `Engine(Net(), DataLoader(data, batch_size=8)).run()`",
        "micro_batch = autotune.current_config(global_batch=32).micro_batch_size",
        "train.py:20 after `self.optimizer.step()`",
        "autotune.report(rows=len(x) * 4, loss=loss)",
    ],
    SEVERAL_OF_A_WRAPPED_MODEL: [
        "train.py:28 after `optimizers = optimizers_of(model)`",
        "model.module, optimizers = autotune.apply(model.module, optimizers)",
        "train.py:29 before `while True:`",
        "micro_batch = autotune.current_config(global_batch=4).micro_batch_size",
        "train.py:24 after the loop `for one in optimizers:`",
        "autotune.report(tokens=batch['input_ids'].numel(), loss=loss)",
    ],
    TWO_MODELS: [
        "train.py:8 after `of = {name: torch.optim.Adam(each.parameters()) for name, each in`",
        "maker, of['maker'] = autotune.apply(maker, of['maker'])",
        "train.py:9 before `for step in range(10**9):`",
        "micro_batch = autotune.current_config(global_batch=16).micro_batch_size",
        'train.py:15 after `of["maker"].zero_grad(); maker_loss.backward(); of["maker"].step()`',
        "autotune.report(rows=len(made), loss=maker_loss)",
    ],
    OF_A_USERS_OPTIMIZER: [
        "train.py:17 after `optimizer = Signs(model.parameters(), rate)`",
        "model, optimizer = autotune.apply(model, optimizer)",
        "train.py:19 before `for features, labels in data:`",
        "micro_batch = autotune.current_config(global_batch=6).micro_batch_size",
        "train.py:22 after `scaler.step(optimizer)`",
        "autotune.report(rows=len(features), loss=loss)",
    ],
    NOT_COME_TO: [
        "train.py:9 after `optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)`",
        "net, optimizer = autotune.apply(net, optimizer)",
        "train.py:10 before `for x, y in DataLoader(data, batch_size=4):`",
        "micro_batch = autotune.current_config(global_batch=4).micro_batch_size",
        "train.py:13 after `optimizer.step()`",
        "autotune.report(tokens=..., loss=loss)",
    ],
}


@pytest.fixture
def examine(server, tmp_path):
    """examine(source) runs the script with that source in a process, and returns what it shows."""

    def run(source):
        (tmp_path / "parts.py").write_text(PARTS)
        (tmp_path / "train.py").write_text(source)
        workload = make_workload("cpu", {"script": str(tmp_path / "train.py")})
        task = Examine(workload=workload, choices={}, device="cpu", learns_global_batch=True)
        return server.submit(task, log_file=tmp_path / "examine.log").result(timeout=60)

    return run


@pytest.fixture
def hint_of(examine, tmp_path):
    """hint_of(source) is the hint of the error for that script, with paths as from its folder."""

    def run(source):
        with pytest.raises(InvalidInput, match=r"does not call autotune\.apply") as raised:
            examine(source)
        return raised.value.hint.replace(f"{tmp_path}/", "")

    return run


def with_lines(source, hint):
    """Returns the script with the lines of the hint at their places."""
    lines = source.splitlines()
    added = re.findall(
        r"^train\.py:(\d+) (after|before) .*`(.*?)(?: \.\.\.)?`\n +(.*)$", hint, re.MULTILINE
    )
    for number, where, quoted, code in sorted(added, key=lambda each: -int(each[0])):
        [statement] = [line for line in lines if line.strip().startswith(quoted)]
        indent = re.match(r" *", statement)[0]
        lines.insert(int(number) if where == "after" else int(number) - 1, indent + code)
    return "\n".join(["import autotune", *lines])


@pytest.mark.parametrize("source", LINES)
def test_the_error_names_the_places_and_the_names_of_this_script(source, hint_of):
    first, *others = hint_of(source).splitlines()
    assert first.startswith("add these lines, and `import autotune`")
    assert [line.strip() for line in others[:6]] == LINES[source]


@pytest.mark.parametrize("source", [each for each in LINES if each is not NOT_COME_TO])
def test_with_these_lines_the_script_is_searched(source, examine, hint_of):
    hint = hint_of(source)
    examined = examine(with_lines(source, hint))
    assert f"global_batch={examined.global_batch})" in hint or examined.global_batch == 8


def test_lines_that_are_there_already_are_not_named_again(hint_of):
    source = PLAIN.replace("args = p", "import autotune\nautotune.current_config()\nargs = p")
    assert "current_config" not in hint_of(source.replace("range(10**9)", "range(1)"))


def test_a_script_that_names_us_may_train_something_else_before(examine):
    before = "\n".join(PLAIN.splitlines()[:16]).replace("net.", "net[1].")
    source = f"""{before}
for _ in range(5):
    net[1].weight.sum().backward()
    adam.step()
import autotune
autotune.apply(net, torch.optim.SGD(net.parameters(), lr=1e-3))
net(rows).sum().backward()
"""
    assert examine(source).own_precision == "fp32"


def test_a_trainer_is_named_with_its_place(hint_of):
    hint = hint_of(
        textwrap.dedent("""
        import sys
        sys.modules["transformers.trainer"] = sys  # as if it was loaded
        class Trainer: pass
        trainer = Trainer()
        """)
    )
    assert hint.startswith("in train.py:5 write Trainer(..., args=args, callbacks=[autotune.")


def test_a_hint_of_several_lines_is_printed_as_such(capsys):
    print_error("is wrong", "do this\n  with \x1b that\nand so on")
    assert capsys.readouterr().err.splitlines() == [
        "error: is wrong",
        "hint: do this",
        "    with \\x1b that",
        "  and so on",
    ]
