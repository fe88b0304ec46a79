"""The memory of evaluation and generation: what nothing learns from is projected only once.

In training every call projects all K = M + T rows to keys and values, since W_kv learns from those
of the memory, too.  Without gradients the projections of M rows are those of calls before.  With
M = 2,100 and T = 80 keeping them leaves 27 times less to project, with T = 1 over 2,000 times; the
same holds for Q, the distances projected, which stay what they are for as long as the weights do.

The rows of a layer lie in a buffer with room behind them, so that a call writes its T rows and
moves none.  With M = 4 and T = 2 (k: a key and its value; .: room):

    buffer              [k k k k k k . .]      memory 1, handed to the caller, ends at 6
    call after memory 1    [k k k k K K]       reads the last M rows, writes two behind them
    buffer              [k k k k k k K K]      memory 2 ends at 8; memory 1 sees what it saw
    a second call after memory 1 (beams): the room behind it is taken.  It moves its M rows into a
    buffer of its own, and so does a call for which the room does not suffice.

So no memory ever changes, and most calls copy nothing.  A memory belongs to the model that made it,
with the weights it had: begin with None when they have changed.
"""
import torch


class EvaluationMemory:
    """The past of lesson 5's model under `no_grad` in eval mode: keys, values and Q by layer."""

    def __init__(self, model, past, h):
        """Room for the T rows of h (B, T, D) behind the last M of past; None is no past yet."""
        config, (B, T, _) = model.config, h.shape
        self.model, self.lanes, self.new = model, B, self  # new: what the next call reads
        self.m = min(past.kept, config.mem_len) if past else 0
        self.K = K = self.m + T
        self.kept = min(K, config.mem_len)  # rows that the next call may see
        autocast = torch.is_autocast_enabled(h.device.type)
        self.dtype = torch.get_autocast_dtype(h.device.type) if autocast else h.dtype

        same = past is not None and past.dtype == self.dtype
        if same and past.filled[0] == past.end and past.end + T <= past.room:
            self.buffers, self.filled, self.room = past.buffers, past.filled, past.room
            self.end = past.end + T
        else:
            self.room, self.end = K + min(K, config.mem_len), K
            self.filled = [K]  # one number for all who share the buffers: where their room begins
            shape = 2, config.n_head, B, self.room, config.d_head
            self.buffers = [torch.empty(shape, dtype=self.dtype, device=h.device)
                            for _ in range(config.n_layer)]
            for new, old in zip(self.buffers, past.buffers if self.m else ()):
                new[..., : self.m, :] = old[..., past.end - self.m : past.end, :]
        self.filled[0] = self.end

        self.clamp_len = config.clamp_len
        if same and past.clamp_len == self.clamp_len and past.Q[0].shape[1] > K:
            self.Q = past.Q  # each (H, distances, C), descending to 0
        else:
            R = model.distances(min(self.room, config.mem_len + T) + 1, h)
            self.Q = [layer.attention.project_distances(R) for layer in model.layers]

    def extend(self, n, attention, h):
        """Layer n reads h (B, T, D) -> keys, values (H, B, K, C), Q (H, K + 1, C) to attend to."""
        seen = self.buffers[n].narrow(-2, self.end - self.K, self.K)  # (2, H, B, K, C)
        for rows, new in zip(seen, attention.keys_values(h)):
            rows[:, :, self.m :] = new
        return *seen, self.Q[n][:, -self.K - 1 :]
