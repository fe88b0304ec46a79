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


class Muon(torch.optim.Adam):
    """Adam and, for groups with a "dtype", Muon (momentum 0.95, decay 0.1) with products in it.

    torch.optim.Muon always multiplies in bf16, for which many CPUs have no instructions (effect:
    training/README.md).
    """

    @torch.no_grad()
    def step(self):
        """Update all weights that have a gradient."""
        for group in (group for group in self.param_groups if "dtype" in group):
            for W in (W for W in group["params"] if W.grad is not None):
                state = self.state[W]
                if not state:  # in Adam's words, since its load_state_dict reads "step"
                    state |= {"step": torch.zeros(()), "exp_avg": torch.zeros_like(W)}
                mean = state["exp_avg"].lerp_(W.grad, 0.05)
                change = orthogonalize(W.grad.lerp(mean, 0.95).to(group["dtype"]))
                W.mul_(1 - 0.1 * group["lr"])
                W.add_(change, alpha=-group["lr"] * max(1, W.shape[0] / W.shape[1]) ** 0.5)
                W.grad = None  # so Adam leaves it
        super().step()


def adam(model, recipe):
    """Return Adam for all weights."""
    return torch.optim.Adam(model.parameters(), lr=recipe.lr, fused=True)


def muon(model, recipe):
    """Return Muon for the matrices of the layers; Adam for embeddings, biases, norms, u and v."""
    matrices = [weight for weight in model.layers.parameters() if weight.dim() == 2]
    taken = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in taken]
    dtype = torch.bfloat16 if recipe.dtype == "bf16" else torch.float32
    return Muon([{"params": others}, {"params": matrices, "dtype": dtype,
                                      "factor": recipe.muon_lr / recipe.lr}], fused=True)


OPTIMIZERS = {"adam": adam, "muon": muon}  # the choices of --optimizer


def make_optimizer(model, recipe):
    """Return the optimizer that the Recipe asks for."""
    return OPTIMIZERS[recipe.optimizer](model, recipe)


def set_rate(optimizer, rate):
    """Set the run's learning rate; that of a group with a "factor" is a multiple of it."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("factor", 1.0)
