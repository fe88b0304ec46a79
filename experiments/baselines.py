"""What the speed of ours is compared with: the plain form, and the sliding window.

The plain form is Transformer-XL as public code writes it: time comes first, (T, B, D); every call
projects the keys and values of the whole memory anew, and R in every layer; the shift pads and
copies; the score is made by four-letter einsums.  The same weights give the same losses as our
model, so only the speed differs.

The sliding window is how a model without memory evaluates: every prediction reads a window of
eval_mem_len tokens afresh and keeps the last position only, as in Al-Rfou et al. (2018), the
baseline of the paper's table 9.  It is as fast as such a model can be: absolute positions, torch's
fused causal attention, and of the last layer nothing but what the last position needs.  No such
model is trained, so its losses mean nothing: only what it has to compute counts.

    python experiments/benchmark.py --against experiments/baselines.py      the plain form
    python experiments/benchmark.py --what window                           the sliding window
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


# ---- the plain form -----------------------------------------------------------------------------

class PlainLayer(nn.Module):
    """Attention over the memory and the segment, then feed-forward; both post-norm."""

    def __init__(self, config):
        super().__init__()
        D, self.H, self.C = config.d_model, config.n_head, config.d_head
        HC, FF = self.H * self.C, config.d_inner
        self.qkv_net, self.r_net = nn.Linear(D, 3 * HC, bias=False), nn.Linear(D, HC, bias=False)
        self.o_net = nn.Linear(HC, D, bias=False)
        self.drop, self.dropatt = nn.Dropout(config.dropout), nn.Dropout(config.dropout_attention)
        self.norm_1, self.norm_2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.feed_forward = nn.Sequential(nn.Linear(D, FF), nn.ReLU(), nn.Dropout(config.dropout),
                                          nn.Linear(FF, D), nn.Dropout(config.dropout))

    def forward(self, h, memory, R, u, v, mask):
        """h (T, B, D), memory (M, B, D), R (K, D), u, v (H, C), mask (T, K) -> (T, B, D)."""
        states = torch.cat([memory, h])  # (K, B, D)
        (T, B, _), K = h.shape, len(states)
        q, k, value = (z.view(K, B, self.H, self.C) for z in self.qkv_net(states).chunk(3, dim=-1))
        q, r = q[-T:], self.r_net(R).view(K, self.H, self.C)
        content = torch.einsum("ibhc,jbhc->ijbh", q + u, k)  # (T, K, B, H)
        position = torch.einsum("ibhc,jhc->ijbh", q + v, r)
        padded = torch.cat([position.new_zeros(T, 1, B, self.H), position], dim=1)
        position = padded.view(K + 1, T, B, self.H)[1:].view_as(position)  # the relative shift
        score = (content + position) / math.sqrt(self.C)
        score = score.float().masked_fill(mask[:, :, None, None], -math.inf).type_as(score)
        probability = self.dropatt(score.softmax(dim=1))
        out = torch.einsum("ijbh,jbhc->ibhc", probability, value).reshape(T, B, -1)
        h = self.norm_1(h + self.drop(self.o_net(out)))
        return self.norm_2(h + self.feed_forward(h))


class Plain(nn.Module):
    """The model; memory is a list of N tensors (M, B, D), same_length always."""

    def __init__(self, config):
        super().__init__()
        self.config, self.mem_len, D = config, config.mem_len, config.d_model
        self.embedding = nn.Embedding(config.vocab_size, D)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.u = nn.Parameter(torch.zeros(config.n_head, config.d_head))
        self.v = nn.Parameter(torch.zeros(config.n_head, config.d_head))
        self.layers = nn.ModuleList(PlainLayer(config) for _ in range(config.n_layer))
        self.drop = nn.Dropout(config.dropout)
        self.register_buffer("frequency", 10000 ** -(torch.arange(0, D, 2) / D))
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, x, memory=None, y=None):
        """x (T, B), y (T, B) -> logits (T, B, V) or losses (T, B) in nats, and the new memory."""
        M, T = self.mem_len, len(x)
        h = self.drop(self.embedding(x) * math.sqrt(self.config.d_model))
        memory = [h[:0]] * len(self.layers) if memory is None else memory
        K = len(memory[0]) + T
        distance = torch.arange(K - 1, -1, -1, device=x.device)
        angle = distance.to(self.frequency)[:, None] * self.frequency
        R = self.drop(torch.cat([angle.sin(), angle.cos()], dim=-1))
        gap = torch.arange(K - T, K, device=x.device)[:, None] - torch.arange(K, device=x.device)
        mask, kept = (gap < 0) | (gap > M), []
        for layer, past in zip(self.layers, memory):
            states = torch.cat([past, h]).detach()
            kept.append(states[max(0, len(states) - M) :])
            h = layer(h, past, R, self.u, self.v, mask)
        logits = F.linear(self.drop(h), self.embedding.weight, self.bias)
        if y is None:
            return logits, kept
        loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction="none")
        return loss.view_as(y), kept


class PlainForm:
    """One training step, one segment of evaluation, one generated token; memories are full."""

    def __init__(self, size, dtype, device):
        self.size, self.device, self.dtype = size, device, dtype
        self.model, self.memory = Plain(size.config).to(device), None
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=2.5e-4, fused=True)

    def read(self, training, T, last=False):
        """Random tokens (T, B) after a full memory -> losses, or the last logits."""
        size, config = self.size, self.size.config
        B, M = size.eval_batch, size.eval_mem_len
        if training:
            B, M = size.batch, config.mem_len
        if training != self.model.training or self.memory is None:
            self.model.train(training)
            self.model.mem_len = M
            self.memory = list(torch.randn(
                config.n_layer, M, B, config.d_model, device=self.device))
        x = torch.randint(config.vocab_size, (T, B), device=self.device)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == "bf16"):
            result, self.memory = self.model(x, self.memory, None if last else x)
        return result

    def step(self):
        """Forward, backward, clip, Adam."""
        self.optimizer.zero_grad()
        self.read(True, self.size.segment).mean().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.25)
        self.optimizer.step()

    @torch.no_grad()
    def evaluate(self):
        """One segment."""
        return self.read(False, self.size.eval_segment).mean()

    @torch.no_grad()
    def generate(self):
        """One token."""
        return self.read(False, 1, last=True).argmax()


make = PlainForm  # what benchmark.py --against calls


# ---- the sliding window -------------------------------------------------------------------------

class SlidingWindow(nn.Module):
    """The model; each call predicts one token for each lane.  It does not train."""

    def __init__(self, size, dtype, device):
        super().__init__()
        config, self.size, self.dtype, self.device = size.config, size, dtype, device
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position = nn.Parameter(torch.randn(size.eval_mem_len, config.d_model))
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(
            config.d_model, config.n_head, config.d_inner, dropout=0.0, batch_first=True)
            for _ in range(config.n_layer))
        causal = nn.Transformer.generate_square_subsequent_mask(size.eval_mem_len)
        self.register_buffer("causal", causal)
        self.to(device)

    @torch.no_grad()
    def evaluate(self):
        """The last position of a window of random tokens: one token for each lane, (B,)."""
        x = torch.randint(self.size.config.vocab_size, (self.size.eval_batch, len(self.position)),
                          device=self.device)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.dtype == "bf16"):
            h, (*layers, last) = self.embedding(x) + self.position, self.layers
            for layer in layers:  # the mask is not read: is_causal takes the fused attention
                h = layer(h, self.causal, is_causal=True)
            out, _ = last.self_attn(h[:, -1:], h, h, need_weights=False)
            h = last.norm1(h[:, -1:] + out)  # (B, 1, D)
            h = last.norm2(h + last.linear2(F.relu(last.linear1(h))))
            return F.linear(h, self.embedding.weight)[:, 0].argmax(-1)
