"""Small models in the forms that scripts bring: own, of transformers or peft, wrapped, compiled."""

import abc
import functools
import types

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

WIDTH, VOCABULARY, LAYERS = 16, 32, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        query, key, value = self.into(x).view(*x.shape[:2], 2, -1).transpose(1, 2).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(attended.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, block=Block):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def own_model():
    return Model()


def sequential():
    blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), blocks, nn.Linear(WIDTH, VOCABULARY))


def tied_weights():
    model = Model()
    model.head.weight = model.embedding.weight
    return model


class NormalizedBlock(Block):
    def __init__(self):
        super().__init__()
        self.statistics = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return super().forward(self.statistics(x.transpose(1, 2)).transpose(1, 2))


def batch_norm():
    return Model(NormalizedBlock)


def shared_block():
    model = Model()
    model.blocks = nn.ModuleList([model.blocks[0]] * LAYERS)
    return model


def _of_transformers(name, **sizes):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(name, vocab_size=VOCABULARY, **sizes)
    return AutoModelForCausalLM.from_config(config)


_SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
}


def llama():
    return _of_transformers("llama", **_SIZES)


def gpt2():
    return _of_transformers("gpt2", n_embd=WIDTH, n_layer=LAYERS, n_head=2, n_positions=16)


def bert():
    return _of_transformers("bert", is_decoder=True, **_SIZES)


def peft_model():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first, so that nothing would show
            nn.init.normal_(parameter)
    return model


def compiled_wrapper():
    return torch.compile(Model(), backend="eager")


def compiled_in_place():
    model = Model()
    model.compile(backend="eager")
    return model


def compiled_blocks():
    model = Model()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="eager")
    return model


class Wrapper(nn.Module):
    """Calls a module, as DistributedDataParallel does."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def wrapped():
    return Wrapper(Model())


def checkpoint_wrappers():
    model = Model()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    return model


def _partly_of(function, module, *args):
    return function(module, *args)


def own_forwards():
    """Forward is set on the objects, as accelerate does."""
    model = Model()
    model.forward = types.MethodType(Model.forward, model)
    for block in model.blocks:
        block.forward = functools.partial(_partly_of, Block.forward, block)
    return model


def _scaled(_module, _inputs, output):
    return output * 1.01


def hooked():
    model = Model()
    for block in model.blocks:
        block.register_forward_hook(_scaled)
        block.attention.register_forward_hook(_scaled)
    return model


class OwnState(Model):
    """Pickles all that the object has, as LightningModule does."""

    def __getstate__(self):
        return dict(self.__dict__)


class OwnStateBlock(Block):
    def __getstate__(self):
        return dict(self.__dict__)


def own_state():
    return OwnState(OwnStateBlock)


KNOWN = {}


class Registered(nn.Module, abc.ABC):
    """Remembers its subclasses by their names, and needs an argument of each."""

    def __init_subclass__(cls, *, key):
        KNOWN[cls.__name__] = key, cls


class RegisteredBlock(Registered, Block, key="block"):
    pass


class RegisteredModel(Registered, Model, key="model"):
    pass


def registered():
    return RegisteredModel(RegisteredBlock)


FORMS = {
    form.__name__: form
    for form in (
        own_model,
        sequential,
        tied_weights,
        batch_norm,
        shared_block,
        llama,
        gpt2,
        bert,
        peft_model,
        compiled_wrapper,
        compiled_in_place,
        compiled_blocks,
        wrapped,
        checkpoint_wrappers,
        own_forwards,
        hooked,
        own_state,
        registered,
    )
}
