"""The optimizer of a run: Adam, or Muon for the matrices of the layers and Adam for the rest.

A matrix stretches vectors along some directions; how far, its singular values say.  A gradient is a
sum over tokens, dominated by what most of them share: a few of its singular values are far larger
than all others.  Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) keeps the
directions of the averaged gradient and makes all its singular values about 1, so that rare
directions change as much as common ones.

It is for matrices that map vectors to vectors: all matrices of the layers, also W_kR.  Embeddings,
whose rows belong to single tokens, biases, norms, u and v stay with Adam.
"""
import torch


def orthogonalize(G):
    """Return about U V^T for G = U S V^T (m, n), with matrix products only (Newton-Schulz).

    Each round applies one polynomial to all singular values S; five move them, unless they are
    tiny, to 0.7 to 1.2.
    """
    Z = G if G.shape[0] <= G.shape[1] else G.T  # the smaller product Z Z^T
    Z = Z / Z.norm().clamp(min=1e-7)  # S <= 1, since the squares of all S now add up to 1
    for _ in range(5):
        squares = Z @ Z.T  # U S^2 U^T
        # addmm(A, B, C) is beta A + alpha B C; the constants are the authors'
        factor = torch.addmm(squares, squares, squares, beta=-4.7750, alpha=2.0315)
        Z = torch.addmm(Z, factor, Z, beta=3.4445)  # 3.4445 S - 4.7750 S^3 + 2.0315 S^5
    return Z if G.shape[0] <= G.shape[1] else Z.T


class Muon(torch.optim.Adam):
    """Muon for groups of the kind "muon", with products in the group's "dtype"; Adam for the rest.

    torch.optim.Muon always multiplies in bf16, for which many CPUs have no instructions (effect:
    training/README.md).  Its results in bf16 are the same.
    """

    @torch.no_grad()
    def step(self):
        """Update all weights that have a gradient."""
        every = self.param_groups
        for group in (group for group in every if group["kind"] == "muon"):
            for W in (W for W in group["params"] if W.grad is not None):
                state = self.state[W]
                if not state:  # Adam's load_state_dict expects a "step"
                    state |= {"step": torch.zeros(()), "exp_avg": torch.zeros_like(W)}
                mean = state["exp_avg"].lerp_(W.grad, 0.05)  # momentum 0.95
                change = orthogonalize(W.grad.lerp(mean, 0.95).to(group["dtype"]))  # Nesterov's
                W.mul_(1 - 0.1 * group["lr"])  # weight decay
                W.add_(change, alpha=-group["lr"] * max(1, W.shape[0] / W.shape[1]) ** 0.5)
        self.param_groups = [group for group in every if group["kind"] == "adam"]
        super().step()
        self.param_groups = every


def adam(model, recipe):
    """Return Adam for all weights."""
    return torch.optim.Adam(model.parameters(), lr=recipe.lr, fused=True)


def muon(model, recipe):
    """Return Muon for the matrices of the layers; Adam for embeddings, biases, norms, u and v."""
    matrices = [weight for weight in model.layers.parameters() if weight.dim() == 2]
    taken = {id(weight) for weight in matrices}  # `in` would compare numbers
    others = [weight for weight in model.parameters() if id(weight) not in taken]
    dtype = torch.bfloat16 if recipe.dtype == "bf16" else torch.float32
    return Muon([{"kind": "adam", "params": others},
                 {"kind": "muon", "params": matrices, "dtype": dtype,
                  "factor": recipe.muon_lr / recipe.lr}], fused=True)


OPTIMIZERS = {"adam": adam, "muon": muon}  # the choices of --optimizer


def set_rate(optimizer, rate):
    """Set the learning rate: rate, times a group's "factor" if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("factor", 1.0)
