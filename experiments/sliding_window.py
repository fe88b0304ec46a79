"""The sliding window: how a model without memory evaluates, to compare the speed of ours with.

Every prediction reads a window of eval_mem_len tokens afresh and keeps the last position only, as
in Al-Rfou et al. (2018), the baseline of the paper's table 9.  Written to be as fast as such a
model can be: absolute positions, torch's fused causal attention, and of the last layer nothing but
what the last position needs.  Its losses mean nothing here (no such model is trained): only what it
has to compute counts.

    python experiments/benchmark.py --what generate --against experiments/sliding_window.py
    python experiments/table9_eval_speed.py
"""
import torch
import torch.nn as nn
import torch.nn.functional as F


class WindowLayer(nn.Module):
    """Causal attention within the window, then feed-forward; both post-norm."""

    def __init__(self, config):
        super().__init__()
        D, HC, FF = config.d_model, config.n_head * config.d_head, config.d_inner
        self.C = config.d_head
        self.W_q, self.W_kv = nn.Linear(D, HC, bias=False), nn.Linear(D, 2 * HC, bias=False)
        self.W_o = nn.Linear(HC, D, bias=False)
        self.norm_1, self.norm_2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.W_1, self.W_2 = nn.Linear(D, FF), nn.Linear(FF, D)

    def forward(self, h, last_only):
        """(B, L, D) -> (B, L, D), or only its last position, (B, 1, D)."""
        rows, h = h, h[:, -1:] if last_only else h
        q, k, value = (z.unflatten(-1, (-1, self.C)).transpose(1, 2) for z in (
            self.W_q(h), *self.W_kv(rows).chunk(2, dim=-1)))  # (B, H, n, C)
        out = F.scaled_dot_product_attention(q, k, value, is_causal=not last_only)
        h = self.norm_1(h + self.W_o(out.transpose(1, 2).flatten(-2)))
        return self.norm_2(h + self.W_2(F.relu(self.W_1(h))))


class SlidingWindow(nn.Module):
    """evaluate() predicts eval_segment tokens, generate() one, for each lane; it does not train."""

    def __init__(self, size, dtype, device):
        super().__init__()
        config, self.size, self.dtype, self.device = size.config, size, dtype, device
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position = nn.Parameter(torch.randn(size.eval_mem_len, config.d_model))
        self.layers = nn.ModuleList(WindowLayer(config) for _ in range(config.n_layer))
        self.to(device)

    @torch.no_grad()
    def generate(self):
        """One token for each lane: the last position of a window of random tokens."""
        x = torch.randint(self.size.config.vocab_size, (self.size.eval_batch, len(self.position)),
                          device=self.device)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == "bf16"):
            h = self.embedding(x) + self.position
            for n, layer in enumerate(self.layers):
                h = layer(h, last_only=n == len(self.layers) - 1)
            return F.linear(h, self.embedding.weight)[:, 0].argmax(-1)  # (B,)

    def evaluate(self):
        """The same for each token of a segment."""
        return [self.generate() for _ in range(self.size.eval_segment)]


make = SlidingWindow
