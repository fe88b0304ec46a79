"""SPOILERS.  The eighteen solutions as they stand in the lessons, without their docstrings.

In the student edition the lessons are blank, and the known mistakes are edits of these.  This file
is read as text and never run; a test holds it equal to the lessons.
"""


def lanes(tokens, B):
    if B < 1:
        raise ValueError(f"a stream is cut into at least 1 lane, not {B}")
    L = (len(tokens) - 1) // B
    if L < 1:
        raise ValueError(f"{B} lanes need at least {B + 1} tokens, got {len(tokens)}")
    return torch.stack([tokens[b * L : (b + 1) * L + 1] for b in range(B)])


def segments(stream, T, start=0):
    if T < 1:
        raise ValueError(f"a segment has at least 1 token, not {T}")
    L = stream.shape[1] - 1
    for t in range(start, L, T):
        end = min(t + T, L)
        yield stream[:, t:end].long(), stream[:, t + 1 : end + 1].long()


def sinusoid(position, D):
    if D % 2:
        raise ValueError(f"the sinusoid needs an even width, got {D}")
    two_k = torch.arange(0, D, 2, dtype=torch.float64, device=position.device)
    angle = position.double()[:, None] * 10000.0 ** (-two_k / D)  # (n, D/2)
    return torch.cat([angle.sin(), angle.cos()], dim=-1)  # (n, D)


def update_memory(memory, h, M):
    joined = torch.cat([memory, h], dim=1)  # (B, m + T, D)
    first = max(0, joined.shape[1] - M)  # a negative index would count from the end
    return joined[:, first:].detach()


def causal_mask(T, M, device=None):
    i = torch.arange(T, device=device)[:, None]
    j = torch.arange(M + T, device=device)
    return j > M + i  # (T, K)


def reach(N, T, M):
    first = 0  # the query is token T - 1 of the segment that starts at 0
    for _ in range(N):
        # -4, -3, -2, -1 are one segment, if T = 4: // rounds down, so -3 // 4 * 4 is -4
        first = first // T * T - M
    return T - 1 - first


def gradient_into(model, x, y, T):
    inputs = []  # what model.embedding puts out for each segment
    def keep(module, args, output):
        output.retain_grad()  # without it backward() gives a .grad to weights only
        inputs.append(output)
    # a forward hook: PyTorch calls it with the output each time the module has run
    hook = model.embedding.register_forward_hook(keep)
    loss_2 = stream_losses(model, x, y, T)[:, T:].sum()
    hook.remove()
    loss_2.backward()
    # exactly 0 for segment 1, as the memory is detached.  0 and not None: the losses of
    # segment 1 are in the graph, too, and the slice sends zeros back through them
    return [h.grad.abs().max().item() for h in inputs]


def four_terms(q, k, R, W_kR, u, v):
    (T, C), K = q.shape, k.shape[0]
    M, terms = K - T, np.full((4, T, K), np.nan)
    for i in range(T):
        for j in range(M + i + 1):
            distance = M + i - j
            terms[0, i, j] = q[i] @ k[j]  # (a)
            terms[1, i, j] = q[i] @ (W_kR @ R[distance])  # (b)
            terms[2, i, j] = u @ k[j]  # (c)
            terms[3, i, j] = v @ (W_kR @ R[distance])  # (d)
    return terms


def rel_shift_by_index(x):
    T, K = x.shape[-2:]
    i, j = torch.arange(T, device=x.device)[:, None], torch.arange(K, device=x.device)
    source = (j + T - 1 - i).clamp(max=K - 1)  # (T, K)
    return x.gather(-1, source.expand(x.shape))


def rel_shift(x):
    *batch, T, K = x.shape
    x = F.pad(x, (1, 0))  # (..., T, K + 1): one zero in front of every row
    x = x.reshape(*batch, K + 1, T)  # the same numbers in the same order, in rows of T
    # number the cells row by row from 0: the pad moves the argument's cell (i, c) to
    # i * (K + 1) + 1 + c; without the first T cells that is i * K + c - (T - 1 - i)
    return x[..., 1:, :].reshape(*batch, T, K)


def hidden_keys(T, m, M, same_length, device=None):
    i, j = torch.arange(T, device=device)[:, None], torch.arange(m + T, device=device)
    distance = m + i - j  # (T, K), since query i is key m + i
    return (distance < 0) | (distance > M) if same_length else distance < 0


def distance_encoding(K, D, clamp_len=0, device=None):
    distance = torch.arange(K - 1, -1, -1, device=device)
    return sinusoid(distance.clamp(max=clamp_len) if clamp_len > 0 else distance, D)


def attend(self, q, k, value, Q, u, v, hidden):
    score = relative_score(q, k, Q, u, v) / math.sqrt(self.C)  # (B, H, T, K)
    # -inf, not a large negative number: a hidden probability is exactly 0
    probability = score.masked_fill(hidden, float("-inf")).softmax(-1)
    out = self.dropout_attention(probability) @ value  # (B, H, T, C)
    return out.transpose(1, 2).flatten(2)


def forward(self, h, memory, R, u, v, hidden):
    attended = self.attention(h, memory, R, u, v, hidden)
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
def generate(model, prompt, n_tokens, top_k=None, temperature=1.0, generator=None):
    if prompt.dim() == 1:
        return generate(model, prompt[None], n_tokens, top_k, temperature, generator)[0]
    if n_tokens < 0:
        raise ValueError(f"n_tokens must be 0 or more, got {n_tokens}")
    top_k = min(40, model.config.vocab_size) if top_k is None else top_k
    tokens, x, memory, training = [prompt[:, :0]], prompt, None, model.training
    model.eval()
    try:
        for _ in range(n_tokens):
            logits, memory = model(x, memory, last_only=True)  # (B, 1, V)
            x = sample_top_k(logits[:, -1], top_k, temperature, generator)  # (B, 1)
            tokens.append(x)
    finally:
        model.train(training)
    return torch.cat(tokens, dim=1)


def train_step(model, optimizer, x, y, memory, run):
    optimizer.zero_grad()
    with autocast(run, x.device.type):
        losses, new_memory = model(x, memory, y)  # (B, T)
    loss = losses.mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip)
    loss, norm = loss.item(), norm.item()
    if not math.isfinite(loss + norm):
        return loss, norm, memory
    optimizer.step()
    return loss, norm, new_memory


@torch.no_grad()
def evaluate(model, tokens, run, label="evaluating", skip=0):
    device, T = model.u.device, reading_length(run)
    stream, memory = lanes(tokens.to(device), 1), None
    total = torch.zeros((), dtype=torch.float64, device=device)
    parts = math.ceil((len(tokens) - 1) / T)
    with evaluating(model, run), autocast(run, device.type):  # one cast of the weights
        read = progress(segments(stream, T), label, parts)
        for i, (x, y) in enumerate(read):
            loss, memory = model(x, memory, y)  # (1, T)
            total += loss[:, max(0, skip - i * T) :].double().sum()
    return total.item() / (len(tokens) - 1 - skip)
