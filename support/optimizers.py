"""The optimizer of a run: Adam, or Muon for the matrices of the layers and Adam for the rest.

A gradient is a sum over tokens, and what most tokens ask for covers what few do: of its singular
values the first are hundreds of times the last.  Muon (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/; torch.optim.Muon) keeps the directions of the averaged
gradient and makes all its singular values about 1, so that a step moves rare directions as far as
common ones.  It asks for matrices that map hidden states to hidden states: all that the layers
have.  Embeddings (a row is moved when its token occurs), biases, norms, u and v stay with Adam.
"""
import torch

MUON = {"momentum": 0.95, "weight_decay": 0.0}
KEPT = {torch.optim.Adam: {"step", "exp_avg", "exp_avg_sq"}, torch.optim.Muon: {"momentum_buffer"}}


class Optimizer:
    """One or two of torch's optimizers, used like one: `parts` hold a group of weights each.

    run.optimizer is "adam" or "muon" (train.py's Run, checked there).
    """

    def __init__(self, model, run):
        matrices = [weight for weight in model.layers.parameters()
                    if weight.dim() == 2 and run.optimizer == "muon"]
        taken = {id(weight) for weight in matrices}
        others = [weight for weight in model.parameters() if id(weight) not in taken]
        self.parts = [torch.optim.Adam(others, lr=run.lr, fused=True)]
        self.proportions = [1.0, run.muon_lr / run.lr]
        if matrices:
            self.parts.append(torch.optim.Muon(matrices, lr=run.muon_lr, **MUON))

    def set_rate(self, rate):
        """Adam's learning rate from here on; Muon's stays in proportion to it."""
        for part, proportion in zip(self.parts, self.proportions):
            part.param_groups[0]["lr"] = rate * proportion

    def zero_grad(self):
        """Forget the gradients."""
        for part in self.parts:
            part.zero_grad()

    def step(self):
        """Move all weights."""
        for part in self.parts:
            part.step()

    def state_dict(self):
        """A list, the state of each part."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states):
        """The same back.  ValueError if it is that of other weights or settings."""
        for part, state in zip(self.parts, states, strict=True):
            if not all(isinstance(z, dict) for z in state["state"].values()):
                raise ValueError("moments of another form")
            part.load_state_dict(state)
            check(part)


def check(part):
    """ValueError if what was loaded does not belong to the weights of a part.

    torch would end the process without a word if moments had another shape than their weights.
    """
    (group,) = part.param_groups
    for weight in group["params"] if part.state else ():
        moments = part.state[weight]
        if moments.keys() != KEPT[type(part)] or any(
                z.shape != weight.shape and not (name == "step" and z.numel() == 1)
                for name, z in moments.items()):
            raise ValueError("moments of another shape")
    settings = {key: value for key, value in group.items() if key not in ("params", "lr")}
    if settings != {key: part.defaults[key] for key in settings}:
        raise ValueError(f"settings of {type(part).__name__} {settings}")
