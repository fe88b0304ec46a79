"""Stand-ins for models and modules, which note how they are called."""
import math
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.nn as nn


def on_the_device(call):
    """Does `call(device)` return a tensor that is there, made without one of another device?

    The device is meta, where nothing is computed: there torch refuses tensors of two devices.
    """
    try:
        return call(torch.device("meta")).device.type == "meta"
    except RuntimeError:
        return False


# ---- models -------------------------------------------------------------------------------------

class CountingModel:
    """Stands for lesson 2's model: the logit of a word is how often it was read in the segments
    before, and 1 more for the word that is read now.  The memory are these counts, (B, 3)."""

    def __init__(self):
        self.lengths, self.memories = [], []
        self.weight = torch.ones(3, dtype=torch.float64, requires_grad=True)

    def __call__(self, x, memory=None):
        """x (B, T), memory (B, 3) or None -> logits (B, T, 3), memory (B, 3)."""
        self.lengths.append(x.shape[1])
        self.memories.append(memory)
        now = nn.functional.one_hot(x, 3).double()
        before = torch.zeros(len(x), 3).double() if memory is None else memory
        return self.weight * (before[:, None] + now), before + now.sum(1)


# ---- modules ------------------------------------------------------------------------------------

class Multiply(nn.Module):
    """Stands for a dropout or a norm: multiplies, so that one sees where it was called."""

    p = 0.0  # who asks for the rate of a dropout gets one that does nothing

    def __init__(self, factor):
        super().__init__()
        self.factor, self.given = factor, []

    def forward(self, z):
        self.given.append(z.detach())
        return self.factor * z

    def seen(self):
        """All numbers that it was given, in one row, ascending; in whatever shapes they came."""
        numbers = [z.flatten() for z in self.given]
        return torch.cat(numbers).sort().values if numbers else torch.zeros(0)


class Constant(nn.Module):
    """Stands for an attention: gives the same whatever it gets, and keeps what it got."""

    def __init__(self, result):
        super().__init__()
        self.result, self.given = result, []

    def forward(self, *given):
        self.given.append(given)
        return self.result


class Mix(nn.Module):
    """Stands for an attention: depends on every argument, each in its own way, and differently in
    each feature, for what is the same in all of them a norm takes away."""

    def forward(self, h, memory, R, u, v, mask):
        slope = torch.linspace(-1, 1, h.shape[-1], dtype=h.dtype)
        return h.roll(1, 1) + (2 * memory.sum() - 0.5 * R.sum() + 3 * u.sum() - v.sum()
                               + 5 * mask.double().mean()) * slope


# ---- generation ---------------------------------------------------------------------------------

class Adder(nn.Module):
    """A language model by arithmetic: the next token is the sum of all that it has read, modulo V.

    Its memory is that sum: a token that is read twice, or a memory that is not handed on, shows in
    the very next token.
    """

    def __init__(self, V=1000):
        super().__init__()
        self.config, self.u = SimpleNamespace(vocab_size=V), nn.Parameter(torch.zeros(1))
        self.lengths, self.memories, self.gradients = [], [], []  # of each call

    def forward(self, x, memory=None, y=None, last_only=False):
        if x.dim() != 2:
            raise ValueError(f"the model reads tokens (B, T), got {tuple(x.shape)}")
        self.lengths.append(x.shape[1])
        self.memories.append(memory)
        self.gradients.append(torch.is_grad_enabled())
        V, sums = self.config.vocab_size, x.cumsum(1) + (0 if memory is None else memory)
        logits = 20.0 * nn.functional.one_hot(sums % V, V)
        return logits[:, -1:] if last_only else logits, sums[:, -1:]


class Greedy:
    """In place of sample_top_k: takes the best token, and notes what else it is given."""

    def __init__(self):
        self.given = []

    def __call__(self, logits, top_k, temperature=1.0, generator=None):
        if logits.dim() != 2:
            raise ValueError("sample_top_k takes the logits of one position, (B, V), got "
                             f"{tuple(logits.shape)}")
        self.given.append((top_k, temperature, generator))
        return logits.argmax(-1, keepdim=True)


# ---- train.py -----------------------------------------------------------------------------------

class Recorded(Exception):
    """Raised by a Ledger on the meta device, where nothing can be computed, once it is called."""


class Ledger(nn.Module):
    """A model of two weights, W = u = 1, that writes down how it is called.

    losses = W * y + u * memory; the new memory is the last token of each lane, (B, 1, 1).
    bad: which number is not finite: "loss and gradient", "loss" or "gradient".
    others: what the mean over the ranks is said to be; by default the loss of this one.
    """

    def __init__(self, bad="", others=None):
        super().__init__()
        self.W, self.u = (nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(2))
        self.bad, self.others = bad, others
        self.synced, self.backward_in = [], []  # of each no_sync `last`; where backward() ran
        self.calls, self.open = [], []  # open: the `with` blocks that run now
        self.W.register_hook(self.backward_runs)

    def forward(self, x, memory=None, y=None):
        kept = None if memory is None else [layer.clone() for layer in memory]
        self.calls.append(SimpleNamespace(x=x, memory=kept, y=y, open=tuple(self.open),
                                          grad=torch.is_grad_enabled()))
        if self.W.is_meta:
            raise Recorded
        if memory is not None and len(memory[0]) != len(x):
            raise ValueError(f"the memory is that of {len(memory[0])} lanes, x has {len(x)}")
        if x.dtype != torch.int64:
            raise ValueError(f"x must be int64, got {x.dtype}")
        return self.losses(memory, y), [x[:, -1:, None].double()]

    def losses(self, memory, y):
        """(B, T)"""
        losses = self.W * y
        if memory is not None:
            losses = losses + self.u * memory[0].sum((1, 2))[:, None]
        if self.bad == "loss":  # a number that is added has no gradient
            return losses + math.inf
        return losses * math.nan if self.bad == "loss and gradient" else losses

    def autocast(self, recipe, device):
        """In the place of machine.autocast: open while its block runs."""
        return Block(("autocast", device), self.open)

    def no_sync(self, model, last):
        """In the place of ranks.no_sync: notes `last`, and is open while its block runs."""
        self.synced.append(last)
        return Block(("no_sync", last), self.open)

    def mean(self, number):
        """In the place of ranks.mean."""
        return number if self.others is None else self.others

    def backward_runs(self, gradient):
        """Called by torch with W's gradient: notes which blocks are open."""
        self.backward_in += self.open
        return gradient * math.inf if self.bad == "gradient" else gradient

    @contextmanager
    def evaluating(self, model, recipe):
        """In the place of train.evaluating."""
        training = model.training
        model.eval()
        with Block("evaluating", self.open):
            yield
        model.train(training)


class Block:
    """What `with` enters: stands in a list while it is open.  It may be entered again."""

    def __init__(self, name, open_now):
        self.name, self.open_now = name, open_now

    def __enter__(self):
        self.open_now.append(self.name)

    def __exit__(self, *error):
        self.open_now.remove(self.name)


class OneLargeLoss(Ledger):
    """Losses in float32: one of 2^24, then only ones, which float32 cannot add to it."""

    def losses(self, memory, y):
        losses = torch.ones(y.shape)
        if memory is None:
            losses[0, 0] = 2.0**24
        return losses


class OpaqueReader:
    """A Ledger behind what training/fast.py's Reader has: no module, and an opaque memory."""

    def __init__(self, model):
        self.__dict__["model"] = model

    def __call__(self, x, memory=None, y=None):
        result, new_memory = self.model(x, memory and memory.layers, y)
        return result, SimpleNamespace(layers=new_memory)

    def __getattr__(self, name):
        if name not in ("u", "config", "training", "train", "eval"):
            raise AttributeError(f"a Reader is no nn.Module and has no {name}")
        return getattr(self.model, name)

    def __setattr__(self, name, value):
        setattr(self.model, name, value)


class Descent:
    """Plain gradient descent of rate 1/2 that counts its steps (torch's own takes a second to get
    ready)."""

    def __init__(self, model):
        self.weights, self.steps = list(model.parameters()), 0
        self.param_groups = [{"params": self.weights, "lr": 0.5}]

    def zero_grad(self, set_to_none=True):
        for weight in self.weights:
            weight.grad = None

    def step(self):
        self.steps += 1
        with torch.no_grad():
            for weight in self.weights:
                if weight.grad is not None:
                    weight -= 0.5 * weight.grad
