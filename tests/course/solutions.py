"""SPOILERS.  The eighteen solutions as they stand in the lessons, without their docstrings.

In the student edition the lessons are blank, and the known mistakes are edits of these.  This file
is read as text and never run; a test holds it equal to the lessons.
"""


def lanes(tokens, B):
    L = (len(tokens) - 1) // B if B > 0 else 0
    rows = [tokens[b * L : (b + 1) * L + 1] for b in range(B)]
    if L < 1:
        raise ValueError(f"{len(tokens)} tokens cannot be cut into {B} lanes: it takes "
                         "at least 1 lane, and more tokens than lanes")
    return torch.stack(rows)


def segments(stream, T, start=0):
    if T < 1:
        raise ValueError(f"a segment has at least 1 token, not {T}")
    L = stream.shape[1] - 1
    for t in range(start, L, T):
        end = min(t + T, L)
        x = stream[:, t:end].long()
        y = stream[:, t + 1 : end + 1].long()
        yield x, y


def sinusoid(position, D):
    if D % 2:
        raise ValueError(f"the sinusoid needs an even width, got {D}")
    two_k = torch.arange(0, D, 2, dtype=torch.float64, device=position.device)
    frequency = 10000.0 ** (-two_k / D)  # (D/2,)
    angle = position.double()[:, None] * frequency  # (n, D/2)
    return torch.cat([angle.sin(), angle.cos()], dim=-1)  # (n, D)


def update_memory(memory, h, M):
    joined = torch.cat([memory, h], dim=1)  # (B, m + T, D)
    first = max(0, joined.shape[1] - M)  # a negative index would count from the end
    return joined[:, first:].detach()


def causal_mask(T, m, device=None):
    i = torch.arange(T, device=device)[:, None]
    j = torch.arange(m + T, device=device)
    return j > m + i  # (T, K)


def reach(N, T, M):
    token = T - 1  # of the segment that starts at 0; with T = M = 4: 3, -4, -8, ...
    for _ in range(N):
        segment_start = token - token % T  # in Python -3 % 4 is 1: -3 is in -4 ... -1
        token = segment_start - M
    return T - 1 - token


def stream_losses(model, x, y, T):
    memory = None
    losses = []
    for x_T, y_T in zip(x.split(T, dim=1), y.split(T, dim=1)):
        logits, memory = model(x_T, memory)
        losses.append(lesson_1.token_losses(logits, y_T))
    return torch.cat(losses, dim=1)


def four_terms(q, k, R, W_kR, u, v):
    T, C = q.shape
    K = k.shape[0]
    m = K - T
    terms = np.full((4, T, K), np.nan)
    for i in range(T):
        for j in range(m + i + 1):
            distance = m + i - j
            terms[0, i, j] = q[i] @ k[j]  # (a)
            terms[1, i, j] = q[i] @ (W_kR @ R[distance])  # (b)
            terms[2, i, j] = u @ k[j]  # (c)
            terms[3, i, j] = v @ (W_kR @ R[distance])  # (d)
    return terms


def rel_shift_by_index(x):
    T, K = x.shape[-2:]
    i = torch.arange(T, device=x.device)[:, None]
    j = torch.arange(K, device=x.device)
    n = (j + T - 1 - i).clamp(max=K - 1)  # (T, K)
    return x.gather(-1, n.expand(x.shape))


def rel_shift(x):
    *batch, T, K = x.shape
    x = F.pad(x, (1, 0))  # (..., T, K + 1): one zero in front of every row
    x = x.reshape(*batch, K + 1, T)  # the same numbers in the same order, in rows of T
    # Count the cells row by row.  In the drawing 13, of query 1, was number 6; two
    # zeros come before it: 8; without the first T = 3 it is 5, the first of row 1.
    # In general cell (i, n) moves from i K + n to i K + n + (i + 1) - T, which is
    # i K + n - (T - 1 - i): T - 1 - i to the left.
    return x[..., 1:, :].reshape(*batch, T, K)


def attention_mask(T, m, M, same_length, device=None):
    i = torch.arange(T, device=device)[:, None]
    j = torch.arange(m + T, device=device)
    distance = m + i - j  # (T, K), since query i is key m + i
    if same_length:
        return (distance < 0) | (distance > M)
    return distance < 0


def distance_encoding(K, D, clamp_len=0, device=None):
    distance = torch.arange(K - 1, -1, -1, device=device)
    if clamp_len > 0:
        distance = distance.clamp(max=clamp_len)
    return lesson_1.sinusoid(distance, D)


def attend(self, q, k, value, k_R, u, v, mask):
    score = lesson_4.relative_score(q, k, k_R, u, v)  # (B, H, T, K)
    score = score / math.sqrt(self.C)
    # -inf, not a large negative number: a masked probability is exactly 0
    probability = score.masked_fill(mask, float("-inf")).softmax(-1)
    out = self.dropout_attention(probability) @ value  # (B, H, T, C)
    return out.transpose(1, 2).flatten(2)


def forward(self, h, memory, R, u, v, mask):
    attended = self.attention(h, memory, R, u, v, mask)
    h = self.norm_1(h + self.dropout_output(attended))
    inner = self.dropout_inner(self.relu(self.W_1(h)))  # (B, T, FF)
    return self.norm_2(h + self.dropout_ff(self.W_2(inner)))


def sample_top_k(logits, top_k, temperature=1.0, generator=None):
    V = logits.shape[-1]
    if not 1 <= top_k <= V:
        raise ValueError(f"top_k must be from 1 to V = {V}, got {top_k}")
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    best, tokens = logits.float().topk(top_k)  # (B, top_k), descending
    probability = (best / temperature).softmax(-1)
    choice = torch.multinomial(probability, 1, generator=generator)  # (B, 1)
    return tokens.gather(-1, choice)


@torch.no_grad()
def generate(model, prompt, n_tokens, top_k=40, temperature=1.0, generator=None):
    top_k = min(top_k, model.config.vocab_size)
    memory = None
    x = prompt
    tokens = [prompt[:, :0]]
    for _ in range(n_tokens):
        logits, memory = model(x, memory, last_only=True)  # (B, 1, V)
        x = sample_top_k(logits[:, -1], top_k, temperature, generator)  # (B, 1)
        tokens.append(x)
    return torch.cat(tokens, dim=1)


def train_step(model, optimizer, x, y, memory, run):
    optimizer.zero_grad()
    loss = 0.0
    new_memory = []  # of each part
    for lanes in micro_batches(len(x), run.micro_batch):
        past = memory and [layer[lanes] for layer in memory]
        # several ranks add up their gradients once, with those of the last part
        with ranks.no_sync(model, last=lanes.stop == len(x)):
            with machine.autocast(run, x.device.type):
                losses, part_memory = model(x[lanes], past, y[lanes])
            part = losses.sum() / y.numel()  # its share of the mean over all lanes
            part.backward()
        loss += part.detach()
        new_memory.append(part_memory)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip).item()
    loss = ranks.mean(loss.item())
    if not math.isfinite(loss + norm):
        return loss, norm, memory
    optimizer.step()
    # the lanes come first in each layer's memory, so the parts' are joined along them
    return loss, norm, [torch.cat(layer) for layer in zip(*new_memory)]


@torch.no_grad()
def evaluate(model, tokens, run, label="evaluating", skip=0):
    device = model.u.device
    T = reading_length(run)
    stream = lesson_1.lanes(tokens.to(device), 1)
    memory = None
    total = torch.zeros((), dtype=torch.float64, device=device)
    parts = math.ceil((len(tokens) - 1) / T)
    with evaluating(model, run), machine.autocast(run, device.type):
        read = progress(lesson_1.segments(stream, T), label, parts)
        for i, (x, y) in enumerate(read):
            loss, memory = model(x, memory, y)  # (1, T)
            total += loss[:, max(0, skip - i * T) :].double().sum()
    return total.item() / (len(tokens) - 1 - skip)
