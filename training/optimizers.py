"""The optimizer of a run: Adam, or Muon for the matrices of the layers and Adam for the rest.

A gradient is a sum over tokens, dominated by what most of them share: a few of its singular values
are far larger than all others.  Muon (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/) keeps the directions of the averaged gradient and makes
all its singular values about 1, so that rare directions change as much as common ones.

It is for matrices that map vectors to vectors: all matrices of the layers, also W_kR.  Embeddings,
of which each row changes when its token occurs, biases, norms, u and v stay with Adam.
"""
import torch


def orthogonalize(G):
    """Return about U V^T for G = U S V^T (m, n), from products alone (Newton-Schulz): each round
    applies one polynomial to all singular values S, and five rounds move them to about 1.
    """
    Z = G if G.shape[0] <= G.shape[1] else G.T  # the smaller product Z Z^T
    Z = Z / Z.norm().clamp(min=1e-7)  # no singular value above 1
    for _ in range(5):
        squares = Z @ Z.T  # U S^2 U^T
        factor = torch.addmm(squares, squares, squares, beta=-4.7750, alpha=2.0315)
        Z = torch.addmm(Z, factor, Z, beta=3.4445)  # 3.4445 S - 4.7750 S^3 + 2.0315 S^5
    return Z if G.shape[0] <= G.shape[1] else Z.T


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon in the run's dtype.  torch's always multiplies in bf16, for which many CPUs
    have no instructions (effect: training/README.md).
    """

    def __init__(self, groups, lr, dtype):
        super().__init__(groups, {"lr": lr})
        self.dtype = torch.bfloat16 if dtype == "bf16" else torch.float32

    @torch.no_grad()
    def step(self):
        """Update all matrices: Nesterov's momentum 0.95, decay 0.1."""
        for group in self.param_groups:
            for W in (W for W in group["params"] if W.grad is not None):
                mean = self.state[W].setdefault("momentum_buffer", torch.zeros_like(W))
                mean.lerp_(W.grad, 0.05)
                change = orthogonalize(W.grad.lerp(mean, 0.95).to(self.dtype))
                W.mul_(1 - 0.1 * group["lr"])
                W.add_(change, alpha=-group["lr"] * max(1, W.shape[0] / W.shape[1]) ** 0.5)


def adam(model, recipe):
    """Return [torch's Adam for all weights]."""
    return [torch.optim.Adam(model.parameters(), lr=recipe.lr, fused=True)]


def muon(model, recipe):
    """Return [Adam for embeddings, biases, norms, u and v; Muon for the matrices of the layers]."""
    matrices = [weight for weight in model.layers.parameters() if weight.dim() == 2]
    taken = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in taken]
    group = {"params": matrices, "factor": recipe.muon_lr / recipe.lr}
    return [torch.optim.Adam(others, lr=recipe.lr, fused=True),
            Muon([group], recipe.muon_lr, recipe.dtype)]


OPTIMIZERS = {"adam": adam, "muon": muon}  # the choices of --optimizer


def make_optimizer(model, recipe):
    """Return the Optimizer that the Recipe asks for."""
    return Optimizer(*OPTIMIZERS[recipe.optimizer](model, recipe))


class Optimizer:
    """One or more of torch's optimizers, used as one.

    A group of weights may have a "factor" of the run's learning rate.
    """

    def __init__(self, *parts):
        self.parts = parts

    @property
    def param_groups(self):
        """Return the groups of all parts."""
        return [group for part in self.parts for group in part.param_groups]

    def set_rate(self, rate):
        """Set the run's learning rate."""
        for group in self.param_groups:
            group["lr"] = rate * group.get("factor", 1.0)

    def zero_grad(self, set_to_none=True):
        """Clear the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none)

    def step(self):
        """Update all weights."""
        for part in self.parts:
            part.step()

    def state_dict(self):
        """Return a list with the state of each part."""
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states):
        """Restore the state of each part.  ValueError for another number of parts or groups."""
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)
