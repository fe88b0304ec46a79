"""Stand-ins for models and modules, which record their calls."""
import math
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


# ---- another device -----------------------------------------------------------------------------

class OneDevice(TorchDispatchMode):
    """Rejects tensors of two devices in one operation, also those that meta accepts."""

    MIXES = "_to_copy", "copy_", "index", "index_put_"  # these accept two devices

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        if name == "_local_scalar_dense":  # .item(): meta has no values, so any will do
            return 1
        given = [z for z in tree_leaves((args, kwargs)) if isinstance(z, torch.Tensor)]
        if name not in self.MIXES and len({z.device for z in given if z.dim()}) > 1:
            raise RuntimeError(f"two devices: {name}")
        return operation(*args, **kwargs or {})


def kind_of(function, *given):
    """Return the dtype and the device of function(*given), or None and the error, if its arguments
    are on meta, a device of every machine that computes nothing."""
    try:
        with OneDevice():
            result = function(*(z.to("meta") if hasattr(z, "to") else z for z in given))
        return result.dtype, result.device.type
    except (RuntimeError, AttributeError) as error:
        return None, str(error)


# ---- models -------------------------------------------------------------------------------------

class StandIn(nn.Module):
    """A module that explains itself if a function asks for more than the rules need."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(f"there is no {name} here, and you do not need it: the model is "
                                 "only called, and its first call gets None as memory") from None


class Adder(StandIn):
    """A language model by arithmetic: the next token is the sum of x + 1 over all tokens x read,
    modulo V.  Any other token has a loss of 1000.1, in float64.  Its memory is that sum: if a token
    is read twice, or the memory is not passed on, the very next token differs."""

    def __init__(self, V=1000):
        super().__init__()
        self.config, self.calls = StandIn(), []
        self.u = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.config.vocab_size = V

    def forward(self, x, memory=None, y=None, last_only=False):
        if x.dim() != 2:
            raise ValueError(f"the model reads tokens (B, T), got {tuple(x.shape)}")
        if memory is not None and not self.calls:
            raise ValueError("the first call gets None as its memory: nothing, not zeros")
        self.calls.append(SimpleNamespace(x=x, memory=memory, grad=torch.is_grad_enabled()))
        V = self.config.vocab_size
        sums = (x + 1).cumsum(1) + (0 if memory is None else memory)
        logits = nn.functional.one_hot(sums % V, V) * (1000.1 + self.u)
        return logits[:, -1:] if last_only else logits, sums[:, -1:]


# ---- modules ------------------------------------------------------------------------------------

class Multiply(nn.Module):
    """Replaces a dropout or a norm: multiplies, so that the result shows where it was called."""

    p = 0.0  # the dropout rate, for solutions that read it

    def __init__(self, factor):
        super().__init__()
        self.factor, self.given = factor, []

    def forward(self, input):
        self.given.append(input.detach())
        return self.factor * input


class Mix(nn.Module):
    """Replaces an attention: depends on each argument in a different way, and differently in each
    feature, because a norm removes what all features share."""

    def forward(self, h, memory, R, u, v, mask):
        slope = torch.linspace(-1, 1, h.shape[-1], dtype=h.dtype)
        return h.roll(1, 1) + (2 * memory.sum() - 0.5 * R.sum() + 3 * u.sum() - v.sum()
                               + 5 * mask.double().mean()) * slope


# ---- generation ---------------------------------------------------------------------------------

class Greedy:
    """Replaces sample_top_k: returns the best token, and records its other arguments."""

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
    """Raised by a call of a Ledger on the meta device, where nothing can be computed."""


class Ledger(StandIn):
    """A model with two weights, W = u = 1, that records its calls.

    losses = W * y + u * memory, the sum of its layers; the new layers, (B, 1, 1) each, are 2 x and
    -x for the last token x of each lane.
    bad: the value that is not finite: "loss and gradient", "loss" or "gradient".
    """

    def __init__(self, bad=""):
        super().__init__()
        self.W, self.u = (nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(2))
        self.bad, self.calls, self.asked = bad, [], []
        self.open = []  # the current `with` blocks
        if bad == "gradient":
            self.W.register_hook(lambda gradient: gradient * math.inf)

    def forward(self, x, memory=None, y=None, last_only=False):
        kept = None if memory is None else [layer.clone() for layer in memory]
        self.calls.append(SimpleNamespace(x=x, memory=kept, y=y, open=tuple(self.open),
                                          grad=torch.is_grad_enabled()))
        if self.W.is_meta:
            raise Recorded
        if memory is not None and len(memory[0]) != len(x):
            raise ValueError(f"the memory is that of {len(memory[0])} lanes, x has {len(x)}")
        last = x[:, -1:, None].double()
        if x.dtype != torch.int64:
            raise ValueError(f"x must be int64, got {x.dtype}")
        return self.losses(memory, y), [2 * last, -last]

    def losses(self, memory, y):
        """Return the losses (B, T)."""
        losses = self.W * y
        if memory is not None:
            losses = losses + self.u * sum(memory).sum((1, 2))[:, None]
        if self.bad == "loss":  # an added constant does not change the gradient
            return losses + math.inf
        return losses * math.nan if self.bad == "loss and gradient" else losses

    def autocast(self, recipe, device):
        """Replace machine.autocast with a Block."""
        return Block(("autocast", device), self.open)

    def progress(self, items, label, total=None, size=None):
        """Replace train.progress, and record what is displayed."""
        self.asked.append((label, total))
        return items

    @contextmanager
    def evaluating(self, model, recipe):
        """Replace train.evaluating."""
        training = model.training
        model.eval()
        with Block("evaluating", self.open):
            yield
        model.train(training)


class Block:
    """A reusable context manager whose name is in a list while it is open."""

    def __init__(self, name, open_now):
        self.name, self.open_now = name, open_now

    def __enter__(self):
        self.open_now.append(self.name)

    def __exit__(self, *error):
        self.open_now.remove(self.name)


class OpaqueReader:
    """A Ledger with the interface of a Reader: it is not a module, and its memory is opaque."""

    def __init__(self, model):
        self.model = model

    def __call__(self, x, memory=None, y=None, last_only=False):
        result, new_memory = self.model(x, memory and memory.layers, y)
        return result, SimpleNamespace(layers=new_memory)

    def __getattr__(self, name):
        if name not in ("u", "config", "training", "train", "eval",  # and train.py's stand-ins:
                        "autocast", "evaluating", "progress"):
            raise AttributeError(f"a Reader is not an nn.Module and has no {name}")
        return getattr(self.model, name)


class Descent:
    """Gradient descent with rate 1/2 that counts its steps; torch's takes a second to start."""

    def __init__(self, model):
        self.zero_grad, self.steps = model.zero_grad, 0
        self.param_groups = [{"params": list(model.parameters()), "lr": 0.5}]

    def step(self, closure=None):
        self.steps += 1
        for weight in self.param_groups[0]["params"]:
            if weight.grad is not None:
                weight.data -= 0.5 * weight.grad
