"""The memory of evaluation and generation: what nothing learns from is projected only once.

In training every call projects all K = M + T rows to keys and values, since W_kv learns from those
of the memory, too.  Without gradients earlier calls have projected the M rows of the memory
already.  With M = 2,100 and T = 80 keeping them leaves 27 times less to project, with T = 1 over
2,000 times; the same holds for Q, the distances projected.  The 12-layer model then evaluates 4.6
and generates 9.8 times as fast as the plain form (experiments/benchmark.py --what eval and --what
generate, --size enwik8-12L --against experiments/plain.py, two cores of an Intel Xeon with AMX).

The rows of a layer lie in a buffer with room behind them, so that most calls (if T is far below M)
write their T rows and copy none.  M = 4; the first call reads 4 tokens, each later one 2 (a, b, c:
rows of call 1, 2, 3):

    buffer    [a a a a . . . .]    memory 1: the caller holds the 4 rows of call 1
    buffer    [a a a a b b . .]    call 2 writes behind them; memory 2 is the last 4 rows, a a b b
    buffer    [a a a a b b c c]    call 3, and so on; with no room left, the last M rows
                                     are copied to a new buffer

Memory 1 still shows what it showed.  A second call after it (two continuations of one text, beams)
finds the room behind it taken, and copies its M rows into a buffer of its own.  So what a caller
holds never changes.  A memory belongs to the model that made it, with the weights that it had:
begin with None when they have changed.
"""
import torch


class Buffers:
    """Keys and values of all layers, (2, H, B, room, C) each, filled from the front."""

    def __init__(self, config, B, room, like):
        shape = 2, config.n_head, B, room, config.d_head
        self.room, self.filled = room, 0
        self.layers = [torch.empty(shape, dtype=like.dtype, device=like.device)
                       for _ in range(config.n_layer)]

    def has_room(self, end, T, like):
        """Whether T rows like these may be written behind row `end`."""
        rows = self.layers[0]
        return (self.filled == end and end + T <= self.room  # nobody wrote there yet, and they fit
                and (rows.dtype, rows.device) == (like.dtype, like.device)
                # what inference_mode has made must not be written to outside of it
                and (torch.is_inference_mode_enabled() or not rows.is_inference()))


class EvaluationMemory:
    """The past of lesson 5's model in eval mode under `no_grad`: keys, values and Q by layer.

        rows of the buffers    [ ... | m of the past | T new | room ]
                                     end - K                 end          K = m + T
    """

    def __init__(self, model, past, h):
        """Room for the T rows of h (B, T, D) behind the last M of past; None is no past yet."""
        config, (B, T, _) = model.config, h.shape
        self.model, self.lanes, self.clamp_len = model, B, config.clamp_len
        self.m = min(past.next_m, config.mem_len) if past else 0
        self.K = K = self.m + T
        self.next_m = min(K, config.mem_len)  # rows that the next call may see
        # no rows, but in the number type that projections have here: bf16 under autocast
        like = model.layers[0].attention.W_kv(h[0, :0])

        if past and past.buffers.has_room(past.end, T, like):
            self.buffers, self.end = past.buffers, past.end + T
        else:
            # doubles while the memory grows; then a full one is copied at most once in M rows
            room = K + min(K, config.mem_len)
            self.buffers, self.end = Buffers(config, B, room, like), K
            if self.m:
                for new, old in zip(self.buffers.layers, past.buffers.layers):
                    new[..., : self.m, :] = old[..., past.end - self.m : past.end, :]
        self.buffers.filled = self.end

        if past and past.clamp_len == self.clamp_len and past.Q[0].shape[1] > K and (
                past.Q[0].dtype == like.dtype):
            self.Q = past.Q  # of each layer (H, count, C), the distances count - 1, ..., 1, 0
        else:
            # enough until the buffers or mem_len grow
            R = model.make_R(min(self.buffers.room, config.mem_len + T) + 1, h)
            self.Q = [layer.attention.project_distances(R) for layer in model.layers]

    def add(self, n, attention, h):
        """Layer n reads h (B, T, D) -> keys, values (H, B, K, C), Q (H, K + 1, C) to attend to."""
        seen = self.buffers.layers[n].narrow(-2, self.end - self.K, self.K)  # (2, H, B, K, C)
        for rows, new in zip(seen, attention.keys_values(h)):
            rows[:, :, self.m :] = new
        return *seen, self.Q[n][:, -self.K - 1 :]
