"""A small Kimi K3 with every structural feature of the released model, for the CPU.

Shape symbols: B batch, T new positions, P past positions, D channels, H hidden width, N heads, K and V per-head key and
value width, E experts, L layers.

How a layer differs from a plain decoder layer: it reads a learned mixture of earlier block snapshots and the running
prefix sum (attention residuals), and attention is either recurrent (KDA, no growing cache) or full (MLA without rotary
positions, so `position_ids` never matter). Module and tensor names are those of the released weights.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_kimi_k3 import KimiK3Config, KimiLinearConfig

# Model outputs call the cache `cache` since transformers 5.19, and warn about the older name.
CACHE_FIELD = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"

KDA_CHUNK = 16
FEW_TOKENS = 64  # up to here, fewer operations count for more than less arithmetic
L2_NORM_EPS = 1e-6
LORA_NORM_EPS = 1e-6
ROUTER_EPS = 1e-20
EMBEDDING_STD = 0.5  # the embeddings are a snapshot of their own, and should not drown among the layers' outputs


# Kimi Delta Attention: two ways to run one recurrence
#
#     S <- diag(exp g_t) S;   S <- S + beta_t k_t (v_t - S^T k_t)^T;   o_t = S^T q_t * K**-0.5
#
# Both functions take q, k [B, T, N, K], v [B, T, N, V], log decay g [B, T, N, K] <= 0, beta [B, T, N] and the state
# [B, N, V, K] (S transposed, zeros when None), work in float32 and return (o [B, T, N, V], new state), never writing to
# the state they were given. A step with g = 0 and beta = 0 leaves the state as it is.


def kda_recurrent(q, k, v, g, beta, initial_state=None):
    """KDA one step after another. Shapes and dtypes: see the note above."""
    q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
    batch, steps, heads, key_dim = q.shape
    state = q.new_zeros(batch, heads, v.shape[-1], key_dim) if initial_state is None else initial_state.float()
    outputs = []
    for t in range(steps):
        state = state * g[:, t, :, None].exp()
        error = v[:, t] - (state * k[:, t, :, None]).sum(-1)
        state = state + (beta[:, t, :, None] * error)[..., None] * k[:, t, :, None]
        outputs.append((state * q[:, t, :, None]).sum(-1))
    return torch.stack(outputs, dim=1) * key_dim**-0.5, state


def kda_chunk(q, k, v, g, beta, initial_state=None):
    """KDA chunk by chunk, up to 16 steps each. Shapes and dtypes: see the note above."""
    batch, _, heads, key_dim = q.shape
    inputs = [x.float().transpose(1, 2) for x in (q, k, v, g, beta[..., None])]
    state = v.new_zeros(batch, heads, v.shape[-1], key_dim) if initial_state is None else initial_state
    outputs, state = [], state.float()
    for chunk in zip(*(x.split(KDA_CHUNK, dim=2) for x in inputs), strict=True):
        output, state = kda_one_chunk(*chunk, state)
        outputs.append(output)
    return torch.cat(outputs, dim=2).transpose(1, 2) * key_dim**-0.5, state


def kda_one_chunk(q, k, v, g, beta, state):
    """Up to 16 steps by matrix products. q, k, v, g [B, N, T, *], beta [B, N, T, 1], state [B, N, V, K], all float32.

    With G the running sum of g, each step writes `k_t w_t^T` where `w = beta * (v - what S holds)`, and all w solve one
    unit lower triangular system. Decay factors exp(G_i - G_j) are split around the middle c of the chunk, as
    exp(G_i - c) * exp(c - G_j): with g >= -5 no exponent leaves [-40, 40], so float32 neither overflows nor loses small
    terms. The state is moved to c too, so that keys and queries meet it and the earlier keys in one product. Returns
    o [B, N, T, V], not scaled yet, and the new state.
    """
    steps = k.shape[2]
    log_decay = g.cumsum(2)
    middle = log_decay[:, :, (steps - 1) // 2, None]
    later = (log_decay - middle).exp()
    k_earlier = k / later
    past = torch.cat([k_earlier, state * middle.exp()], dim=2)
    by_keys, by_queries = (torch.cat([k * later, q * later], dim=2) @ past.mT).split(steps, dim=2)
    by_keys = by_keys * beta
    # Of the keys' overlap the solver reads only what lies below the diagonal.
    w = torch.linalg.solve_triangular(
        by_keys[..., :steps], v * beta - by_keys[..., steps:], upper=False, unitriangular=True
    )
    output = by_queries[..., :steps].tril() @ w + by_queries[..., steps:]
    return output, (past[:, :, steps:] + w.mT @ k_earlier) * later[:, :, -1:]


def l2_normalise(x):
    """x [..., K] over its length, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_NORM_EPS)


def situ(gate, up, beta, linear_beta):
    """SiTU activation, computed in float32, returned in the dtype of `gate`. Shapes of gate and up agree."""
    gate32, up32 = gate.float(), up.float()
    bounded = torch.tanh(gate32 / beta) * torch.sigmoid(gate32) * torch.tanh(up32 / linear_beta)
    return (bounded * (beta * linear_beta)).to(gate.dtype)


def mix_snapshots(snapshots, prefix_sum, norm, proj):
    """Attention residual: softmax mixture of the raw candidates [snapshots..., prefix_sum], all [B, T, H], in float32.

    A candidate's score is its RMS-normalised self times `norm.weight * proj.weight`. Returns [B, T, H] in the prefix
    sum's dtype.
    """
    candidates = torch.stack([*snapshots, prefix_sum]).float()
    direction = norm.weight.float() * proj.weight.float().squeeze(0)
    scores = (candidates @ direction) * torch.rsqrt(candidates.square().mean(-1) + norm.eps)
    return (scores.softmax(0).unsqueeze(-1) * candidates).sum(0).to(prefix_sum.dtype)


def causal_mask(attention_mask, new_positions, past_positions, like):
    """Additive mask [B or 1, 1, T, P + T] in the dtype and on the device of `like`; -max where a query must not look.

    Correct for wide cached forwards (query i sits at P + i) and for left padding (`attention_mask` [B, P + T],
    0 = pad).
    """
    keys = torch.arange(past_positions + new_positions, device=like.device)
    allowed = (keys <= keys[past_positions:, None])[None, None]
    if attention_mask is not None:
        allowed = allowed & attention_mask[:, None, None].bool()
    return torch.zeros_like(allowed, dtype=like.dtype).masked_fill_(~allowed, torch.finfo(like.dtype).min)


def eager_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Plain attention, signature as in transformers' registry. Returns ([B, T, N, V], weights [B, N, T, P + T])."""
    scores = query @ key.mT * scaling + attention_mask
    weights = F.dropout(scores.softmax(-1, dtype=torch.float32).to(query.dtype), p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class KimiDynamicCache:
    """State of the model after the positions seen so far: one entry per layer in each list, None where not used.

    conv_states: (q, k, v) windows [B, D, 4], the last raw projections; recurrent_states: [B, N, V, K] float32;
    key_cache, value_cache: [B, N, P, *]. There is no way to shorten it: a recurrent state cannot be cut.
    """

    def __init__(self, config):
        layers = config.num_hidden_layers
        self.layer_types = ["linear_attention" if config.is_kda_layer(i) else "full_attention" for i in range(layers)]
        self.conv_states = [None] * layers
        self.recurrent_states = [None] * layers
        self.key_cache = [None] * layers
        self.value_cache = [None] * layers

    def update(self, key_states, value_states, layer_idx):
        """Append keys and values [B, N, T, *] of one full-attention layer; returns everything it holds now."""
        if self.key_cache[layer_idx] is not None:
            key_states = torch.cat([self.key_cache[layer_idx], key_states], dim=2)
            value_states = torch.cat([self.value_cache[layer_idx], value_states], dim=2)
        self.key_cache[layer_idx], self.value_cache[layer_idx] = key_states, value_states
        return key_states, value_states

    def get_seq_length(self, layer_idx=None):
        """Positions held, as counted by the given full-attention layer (by default the first one)."""
        keys = self.key_cache[self.layer_types.index("full_attention") if layer_idx is None else layer_idx]
        return 0 if keys is None else keys.shape[2]

    @property
    def has_previous_state(self):
        """True once a forward has filled the recurrent states."""
        return any(state is not None for state in self.recurrent_states)


class KimiRMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in float32, returned in the dtype of x."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps).to(x.dtype)


class KimiGatedRMSNorm(KimiRMSNorm):
    """RMSNorm over each head's channels, times sigmoid(gate), in float32. x and gate [B, T, N, V]."""

    def forward(self, x, gate):
        normed = F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps)
        return (normed * gate.float().sigmoid()).to(gate.dtype)


class ShortConvolution(nn.Module):
    """Depthwise causal convolution followed by SiLU, its state the window of the last raw inputs."""

    def __init__(self, channels, kernel_size):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size))
        self.kernel_size = kernel_size

    def forward(self, x, cache=None, output_final_state=False):
        """x [B, T, D], cache [B, D, 4] or None -> (y [B, T, D], window [B, D, 4] or None).

        One cached token moves the window on in place and returns that very tensor; wider inputs leave `cache` as it was
        and return a new one. Before the first input the window counts as zeros.
        """
        if cache is not None and x.shape[1] == 1:
            cache.copy_(torch.cat([cache[..., 1:], x.transpose(1, 2)], dim=-1))
            return F.silu((cache * self.weight.squeeze(1)).sum(-1)).unsqueeze(1), cache
        past = x.new_zeros(x.shape[0], self.kernel_size, x.shape[2]) if cache is None else cache.transpose(1, 2)
        inputs = torch.cat([past, x], dim=1)
        if x.shape[1] <= FEW_TOKENS:  # a convolution has to be set up, which for few tokens takes longer than to run it
            y = (inputs[:, 1:].unfold(1, self.kernel_size, 1) * self.weight.squeeze(1)).sum(-1)
        else:
            y = F.conv1d(inputs[:, 1:].transpose(1, 2), self.weight, groups=x.shape[2]).transpose(1, 2)
        window = inputs[:, -self.kernel_size :].transpose(1, 2).contiguous() if output_final_state else None
        return F.silu(y), window


class KimiDeltaAttention(nn.Module):
    """Linear attention with a per-channel, bounded decay gate and a full-rank output gate."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        linear = config.linear_attn_config
        self.num_heads = linear["num_heads"]
        self.head_dim = self.head_k_dim = linear["head_dim"]
        self.gate_lower_bound = linear["gate_lower_bound"]
        width, kernel = self.num_heads * self.head_dim, linear["short_conv_kernel_size"]
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.q_conv1d = ShortConvolution(width, kernel)
        self.k_conv1d = ShortConvolution(width, kernel)
        self.v_conv1d = ShortConvolution(width, kernel)
        self.A_log = nn.Parameter(torch.empty(1, 1, self.num_heads, 1, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(width, dtype=torch.float32))
        self.f_a_proj = nn.Linear(config.hidden_size, self.head_dim, bias=False)
        self.f_b_proj = nn.Linear(self.head_dim, width, bias=False)
        self.b_proj = nn.Linear(config.hidden_size, self.num_heads, bias=False)
        self.g_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.o_norm = KimiGatedRMSNorm(self.head_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, hidden_states, padding_mask=None, past_key_values=None):
        """hidden_states [B, T, H] -> [B, T, H]; the cache, when given, is read and brought up to date.

        padding_mask [B, T] (0 = pad) is for prefill: a padded step leaves windows and state as they are. Cached
        forwards pass None, all their tokens are real.
        """
        if padding_mask is not None:
            hidden_states = hidden_states * padding_mask[..., None].to(hidden_states.dtype)
        windows, state = (None, None, None), None
        if past_key_values is not None and past_key_values.conv_states[self.layer_idx] is not None:
            windows = past_key_values.conv_states[self.layer_idx]
            state = past_key_values.recurrent_states[self.layer_idx]

        keep = past_key_values is not None
        q, q_window = self.q_conv1d(x=self.q_proj(hidden_states), cache=windows[0], output_final_state=keep)
        k, k_window = self.k_conv1d(x=self.k_proj(hidden_states), cache=windows[1], output_final_state=keep)
        v, v_window = self.v_conv1d(x=self.v_proj(hidden_states), cache=windows[2], output_final_state=keep)
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)) for x in (q, k, v))
        g = self.log_decay(self.f_b_proj(self.f_a_proj(hidden_states)))
        beta = self.b_proj(hidden_states).float().sigmoid()
        if padding_mask is not None:
            g, beta = g * padding_mask[..., None, None], beta * padding_mask[..., None]

        run = kda_recurrent if hidden_states.shape[1] == 1 else kda_chunk
        o, state = run(l2_normalise(q), l2_normalise(k), v, g, beta, state)
        if keep:
            past_key_values.conv_states[self.layer_idx] = (q_window, k_window, v_window)
            past_key_values.recurrent_states[self.layer_idx] = state
        gate = self.g_proj(hidden_states).unflatten(-1, (self.num_heads, self.head_dim))
        return self.o_proj(self.o_norm(o, gate).flatten(-2))

    def log_decay(self, raw):
        """raw [B, T, N * K] -> g [B, T, N, K] float32 between `gate_lower_bound` and 0."""
        raw = (raw.float() + self.dt_bias.float()).unflatten(-1, (self.num_heads, self.head_dim))
        return self.gate_lower_bound * torch.sigmoid(self.A_log.float().exp() * raw)


class KimiMLAAttention(nn.Module):
    """Full attention with low-rank queries and keys/values, no positions at all, and an output gate.

    The last `qk_rope_head_dim` key channels are shared by all heads; the name is historical, they are never rotated.
    """

    is_causal = False  # the mask passed to the attention function is explicit

    def __init__(self, config, layer_idx):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.nope_dim, self.shared_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.v_head_dim = config.v_head_dim
        self.kv_lora_rank = config.kv_lora_rank
        self.scaling = (self.nope_dim + self.shared_dim) ** -0.5
        q_width, v_width = self.num_heads * (self.nope_dim + self.shared_dim), self.num_heads * self.v_head_dim
        self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
        self.q_a_layernorm = KimiRMSNorm(config.q_lora_rank, LORA_NORM_EPS)
        self.q_b_proj = nn.Linear(config.q_lora_rank, q_width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(config.hidden_size, self.kv_lora_rank + self.shared_dim, bias=False)
        self.kv_a_layernorm = KimiRMSNorm(self.kv_lora_rank, LORA_NORM_EPS)
        self.kv_b_proj = nn.Linear(self.kv_lora_rank, self.num_heads * self.nope_dim + v_width, bias=False)
        self.g_proj = nn.Linear(config.hidden_size, v_width, bias=False)
        self.o_proj = nn.Linear(v_width, config.hidden_size, bias=False)

    def forward(self, hidden_states, attention_mask, past_key_values=None):
        """hidden_states [B, T, H], additive attention_mask [B or 1, 1, T, P + T] -> [B, T, H]; appends to the cache."""
        batch, steps, _ = hidden_states.shape
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        query = query.view(batch, steps, self.num_heads, -1).transpose(1, 2)
        latent, shared = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, self.shared_dim], dim=-1)
        key_value = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, steps, self.num_heads, -1).transpose(1, 2)
        key, value = key_value.split([self.nope_dim, self.v_head_dim], dim=-1)
        key = torch.cat([key, shared.unsqueeze(1).expand(-1, self.num_heads, -1, -1)], dim=-1)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        implementation = self.config._attn_implementation
        attend = eager_attention if implementation == "eager" else ALL_ATTENTION_FUNCTIONS[implementation]
        attended, _ = attend(self, query, key, value, attention_mask, scaling=self.scaling, dropout=0.0)
        return self.o_proj(attended.flatten(-2) * self.g_proj(hidden_states).sigmoid())


class KimiMLP(nn.Module):
    """Gated feed-forward on the full width with the SiTU activation. [..., H] -> [..., H]."""

    def __init__(self, config, intermediate_size):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, config.hidden_size, bias=False)
        self.betas = config.activation_situ_beta, config.activation_situ_linear_beta

    def forward(self, x):
        return self.down_proj(situ(self.gate_proj(x), self.up_proj(x), *self.betas))


class KimiExpert(nn.Module):
    """One routed expert on the latent width: w1 gate, w3 up, w2 down."""

    def __init__(self, config):
        super().__init__()
        latent, inner = config.routed_expert_hidden_size, config.moe_intermediate_size
        self.w1 = nn.Linear(latent, inner, bias=False)
        self.w2 = nn.Linear(inner, latent, bias=False)
        self.w3 = nn.Linear(latent, inner, bias=False)
        self.betas = config.activation_situ_beta, config.activation_situ_linear_beta

    def forward(self, x):
        return self.w2(situ(self.w1(x), self.w3(x), *self.betas))


class KimiMoEGate(nn.Module):
    """Router in float32: the correction bias chooses the experts, the unbiased scores weigh them."""

    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_token
        self.routed_scaling_factor = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        bias = torch.empty(config.num_experts, dtype=torch.float32)
        self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x):
        """x [tokens, H] -> (experts [tokens, top_k] int64, weights [tokens, top_k] float32)."""
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        experts = (scores + self.e_score_correction_bias.float()).topk(self.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(1, experts)
        return experts, weights / (weights.sum(-1, keepdim=True) + ROUTER_EPS) * self.routed_scaling_factor


class KimiSparseMoeBlock(nn.Module):
    """Latent mixture of experts: down, top-k experts, norm, up; plus shared experts on the full width."""

    def __init__(self, config):
        super().__init__()
        latent = config.routed_expert_hidden_size
        self.gate = KimiMoEGate(config)
        self.experts = nn.ModuleList(KimiExpert(config) for _ in range(config.num_experts))
        self.routed_expert_down_proj = nn.Linear(config.hidden_size, latent, bias=False)
        self.routed_expert_up_proj = nn.Linear(latent, config.hidden_size, bias=False)
        self.routed_expert_norm = KimiRMSNorm(latent, config.rms_norm_eps)
        self.shared_experts = KimiMLP(config, config.moe_intermediate_size * config.num_shared_experts)

    def forward(self, x):
        """x [B, T, H] -> [B, T, H]."""
        tokens = x.flatten(0, -2)
        experts, weights = self.gate(tokens)
        latent = self.routed_expert_down_proj(tokens)
        run = self._run_side_by_side if len(tokens) <= FEW_TOKENS else self._run_one_by_one
        routed = run(latent, experts, weights.to(latent.dtype))
        routed = self.routed_expert_up_proj(self.routed_expert_norm(routed))
        return routed.view_as(x) + self.shared_experts(x)

    def _run_one_by_one(self, latent, experts, weights):
        """Each expert on the rows that chose it. latent [tokens, D], experts and weights [tokens, top_k] -> latent."""
        routed = torch.zeros_like(latent)
        for expert in experts.unique().tolist():
            rows, slots = (experts == expert).nonzero(as_tuple=True)
            output = self.experts[expert](latent[rows]) * weights[rows, slots, None]
            routed = routed.index_add(0, rows, output)
        return routed

    def _run_side_by_side(self, latent, experts, weights):
        """All experts that any row may have chosen as one wide expert, on all rows; where a row did not, it weighs 0.

        Shapes as in `_run_one_by_one`.
        """
        running = list(self.experts)
        if experts.numel() < len(running):
            chosen, experts = experts.unique(return_inverse=True)
            running = [running[expert] for expert in chosen.tolist()]
        gate_and_up = torch.cat([expert.w1.weight for expert in running] + [expert.w3.weight for expert in running])
        gate, up = F.linear(latent, gate_and_up).chunk(2, dim=-1)
        inner = situ(gate, up, *running[0].betas).unflatten(-1, (len(running), -1))
        shares = weights.new_zeros(len(latent), len(running)).scatter(1, experts, weights)
        down = torch.cat([expert.w2.weight for expert in running], dim=1)
        return F.linear((inner * shares[..., None]).flatten(1), down)


class KimiDecoderLayer(nn.Module):
    """Attention and feed-forward, each reading a mixture of the block snapshots and the prefix sum."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.starts_block = layer_idx % config.attn_res_block_size == 0
        self.is_kda = config.is_kda_layer(layer_idx)
        self.self_attn = KimiDeltaAttention(config, layer_idx) if self.is_kda else KimiMLAAttention(config, layer_idx)
        self.is_dense = layer_idx < config.first_k_dense_replace
        if self.is_dense:
            self.mlp = KimiMLP(config, config.intermediate_size)
        else:
            self.block_sparse_moe = KimiSparseMoeBlock(config)
        self.input_layernorm = KimiRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = KimiRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attention_res_norm = KimiRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attention_res_proj = nn.Linear(config.hidden_size, 1, bias=False)
        self.mlp_res_norm = KimiRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp_res_proj = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, snapshots, prefix_sum, mask, past_key_values=None):
        """snapshots: list of [B, T, H]; prefix_sum [B, T, H]; mask: padding mask (KDA) or additive mask (MLA).

        Returns (snapshots, prefix_sum) for the next layer. A layer that starts a block pushes the prefix sum as a
        snapshot and lets it restart from the attention output. Layer 0 has no snapshot yet and reads the embeddings
        themselves.
        """
        mixed = prefix_sum
        if snapshots:
            mixed = mix_snapshots(snapshots, prefix_sum, self.self_attention_res_norm, self.self_attention_res_proj)
        attended = self.self_attn(self.input_layernorm(mixed), mask, past_key_values=past_key_values)
        if self.starts_block:
            snapshots, prefix_sum = [*snapshots, prefix_sum], attended
        else:
            prefix_sum = prefix_sum + attended
        mixed = mix_snapshots(snapshots, prefix_sum, self.mlp_res_norm, self.mlp_res_proj)
        feed_forward = self.mlp if self.is_dense else self.block_sparse_moe
        return snapshots, prefix_sum + feed_forward(self.post_attention_layernorm(mixed))


class KimiPreTrainedModel(PreTrainedModel):
    """What the text classes and the wrapper share: initialisation and the parameters that stay float32."""

    config_class = KimiLinearConfig
    base_model_prefix = "model"
    _no_split_modules = ["KimiDecoderLayer"]
    _keep_in_fp32_modules_strict = ["A_log", "dt_bias", "e_score_correction_bias"]
    _supports_sdpa = True
    _is_stateful = True

    def _init_weights(self, module):
        std = self.config.get_text_config().initializer_range
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=EMBEDDING_STD)
        elif isinstance(module, KimiRMSNorm):
            nn.init.ones_(module.weight)
        elif isinstance(module, ShortConvolution):
            nn.init.uniform_(module.weight, -0.5, 0.5)
        elif isinstance(module, KimiMoEGate):
            nn.init.normal_(module.weight, std=std)
            nn.init.zeros_(module.e_score_correction_bias)
        elif isinstance(module, KimiDeltaAttention):
            nn.init.zeros_(module.A_log)
            nn.init.uniform_(module.dt_bias, -7.0, -1.0)  # memories from a thousand steps down to one


class KimiLinearModel(KimiPreTrainedModel):
    """The text backbone: embeddings, layers, the last mixture and the final norm."""

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(KimiDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.output_attn_res_norm = KimiRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.output_attn_res_proj = nn.Linear(config.hidden_size, 1, bias=False)
        self.norm = KimiRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed_tokens

    def set_input_embeddings(self, value):
        self.embed_tokens = value

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        output_hidden_states=None,
        return_dict=None,
        **kwargs,
    ):
        """input_ids [B, T] or inputs_embeds [B, T, H] -> last_hidden_state [B, T, H], past_key_values, hidden_states.

        `attention_mask` [B, P + T], 0 at left padding. `hidden_states`, when asked for, holds the embeddings, the raw
        prefix sum after each layer but the last, and the final normed output: not what the next layer reads.
        Other arguments, among them `position_ids`, are accepted and change nothing, as in the released class.

        Raises:
            ValueError: not exactly one of input_ids and inputs_embeds; a cache of another type; a mask of another shape
                than [B, P + T].
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Pass exactly one of input_ids and inputs_embeds; got both or neither.")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = self.config.use_cache if use_cache is None else use_cache
        cache = self._checked_cache(past_key_values, use_cache)
        full_mask, padding_mask = self._masks(attention_mask, hidden_states, cache)

        snapshots, prefix_sum = [], hidden_states
        trace = [hidden_states]
        for layer in self.layers:
            mask = padding_mask if layer.is_kda else full_mask
            snapshots, prefix_sum = layer(snapshots, prefix_sum, mask, past_key_values=cache)
            trace.append(prefix_sum)
        output = self.norm(mix_snapshots(snapshots, prefix_sum, self.output_attn_res_norm, self.output_attn_res_proj))
        result = BaseModelOutputWithPast(
            last_hidden_state=output,
            hidden_states=(*trace[:-1], output) if output_hidden_states else None,
            **{CACHE_FIELD: cache},
        )
        return result.to_tuple() if return_dict is False else result

    def _checked_cache(self, past_key_values, use_cache):
        if past_key_values is None:
            return KimiDynamicCache(self.config) if use_cache else None
        if not isinstance(past_key_values, KimiDynamicCache):
            raise ValueError(
                f"past_key_values is a {type(past_key_values).__name__}; expected a KimiDynamicCache, because this "
                "model also keeps recurrent states. Pass None at the first forward and reuse the cache of its output."
            )
        return past_key_values

    def _masks(self, attention_mask, hidden_states, cache):
        """(additive mask for full attention, padding mask [B, T] for KDA or None when nothing is padded)."""
        batch, steps, _ = hidden_states.shape
        past = 0 if cache is None else cache.get_seq_length()
        if attention_mask is not None and tuple(attention_mask.shape) != (batch, past + steps):
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}; expected {(batch, past + steps)}: one entry "
                f"for each of the {past} cached and {steps} new positions. Extend the prompt's mask by ones."
            )
        padding_mask = None
        if past == 0 and attention_mask is not None and not attention_mask.bool().all():
            padding_mask = attention_mask.bool().float()
        return causal_mask(attention_mask, steps, past, like=hidden_states), padding_mask


class KimiLinearForCausalLM(KimiPreTrainedModel, GenerationMixin):
    """The text model with its own output head."""

    def __init__(self, config):
        super().__init__(config)
        self.model = KimiLinearModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def set_input_embeddings(self, value):
        self.model.embed_tokens = value

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, new_embeddings):
        self.lm_head = new_embeddings

    def forward(self, input_ids=None, return_dict=None, **kwargs):
        """As `KimiLinearModel.forward`, plus logits [B, T, vocabulary]: `logits_to_keep` is ignored."""
        outputs = self.model(input_ids, return_dict=True, **kwargs)
        result = CausalLMOutputWithPast(
            logits=self.lm_head(outputs.last_hidden_state),
            hidden_states=outputs.hidden_states,
            **{CACHE_FIELD: outputs[CACHE_FIELD] if CACHE_FIELD in outputs else None},
        )
        return result.to_tuple() if return_dict is False else result

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None, attention_mask=None, **kwargs):
        """Only what the cache does not hold yet goes in; the base version expects another kind of cache."""
        if kwargs.get("pixel_values") is not None:
            raise ValueError(
                "generate came with pixel_values; images change the number of positions, which generate cannot "
                "follow. Call forward with the images, then forward again with one new token at a time."
            )
        if past_key_values is not None:
            input_ids = input_ids[:, past_key_values.get_seq_length() :]
        inputs = {"input_ids": input_ids, "past_key_values": past_key_values, "attention_mask": attention_mask}
        return {**inputs, "use_cache": kwargs.get("use_cache")}


class KimiVisionStub(nn.Module):
    """Stands in for the vision tower: embeds patches and lays merge_size x merge_size of them side by side."""

    def __init__(self, config):
        super().__init__()
        width, patch = config["hidden_size"], config["patch_size"]
        self.merge_size = config["merge_size"]
        self.patch_embed = nn.Conv2d(3, width, kernel_size=patch, stride=patch, bias=False)

    def forward(self, pixel_values, grid_thws):
        """pixel_values [patches, 3, P, P], grid_thws [images, 3] -> per image [positions, width * merge**2]."""
        patches = self.patch_embed(pixel_values.to(self.patch_embed.weight.dtype)).flatten(1)
        merge, images = self.merge_size, []
        per_image = patches.split(grid_thws.prod(-1).tolist())
        for (frames, height, width), image in zip(grid_thws.tolist(), per_image, strict=True):
            tiles = image.view(frames, height // merge, merge, width // merge, merge, -1)
            images.append(tiles.transpose(2, 3).flatten(3).flatten(0, 2))
        return images


class KimiK3ForConditionalGeneration(KimiPreTrainedModel):
    """The multimodal wrapper: text model under `language_model`, images spliced in where placeholders stand."""

    config_class = KimiK3Config
    # As released, no GenerationMixin: defining this makes the Auto classes, and only them, add `generate`.
    prepare_inputs_for_generation = KimiLinearForCausalLM.prepare_inputs_for_generation

    def __init__(self, config):
        super().__init__(config)
        vision = config.vision_config
        self.vision_tower = KimiVisionStub(vision)
        width = vision["hidden_size"] * vision["merge_size"] ** 2
        self.mm_projector = nn.Linear(width, config.text_config.hidden_size, bias=False)
        self.language_model = KimiLinearForCausalLM(config.text_config)
        self.post_init()

    def get_input_embeddings(self):
        return self.language_model.get_input_embeddings()

    def set_input_embeddings(self, value):
        self.language_model.set_input_embeddings(value)

    def get_output_embeddings(self):
        return self.language_model.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings):
        self.language_model.set_output_embeddings(new_embeddings)

    def forward(
        self,
        input_ids=None,
        pixel_values=None,
        grid_thws=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        output_hidden_states=None,
        return_dict=None,
    ):
        """As the text model's forward, plus images at prefill. Logits cover every position.

        Each placeholder in input_ids [B, T] becomes its image's `frames * height * width / merge**2` positions, so the
        logits are longer than input_ids, and rows that end up shorter are padded on the left.

        Raises:
            ValueError: pixel_values without input_ids, with a filled cache, or for another number of placeholders.
            TypeError: arguments the released wrapper does not know (`logits_to_keep`, `cache_position`, ...).
        """
        if pixel_values is not None:
            if input_ids is None or (past_key_values is not None and past_key_values.get_seq_length() > 0):
                raise ValueError(
                    "pixel_values came without input_ids or with a filled cache; images replace placeholder tokens of "
                    "the prompt, so pass them together with input_ids in the first forward only."
                )
            inputs_embeds, attention_mask = self._splice_images(input_ids, attention_mask, pixel_values, grid_thws)
            input_ids = None
        return self.language_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
        )

    def _splice_images(self, input_ids, attention_mask, pixel_values, grid_thws):
        """Embeddings [B, longest row, H] and mask [B, longest row] with placeholders expanded, rows left-padded."""
        is_image = input_ids == self.config.media_placeholder_token_id
        if int(is_image.sum()) != len(grid_thws):
            raise ValueError(
                f"input_ids holds {int(is_image.sum())} media placeholders but grid_thws describes {len(grid_thws)} "
                f"images; give one token {self.config.media_placeholder_token_id} for each image."
            )
        images = iter([self.mm_projector(image) for image in self.vision_tower(pixel_values, grid_thws)])
        embeds = self.get_input_embeddings()(input_ids)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        rows = []
        for row in range(len(input_ids)):
            pieces = [next(images) if is_image[row, t] else embeds[row, t : t + 1] for t in range(input_ids.shape[1])]
            lengths = torch.tensor([len(piece) for piece in pieces], device=mask.device)
            rows.append((torch.cat(pieces), mask[row].repeat_interleave(lengths)))
        longest = max(len(row_mask) for _, row_mask in rows)
        embeds = torch.stack([F.pad(row, (0, 0, longest - len(row), 0)) for row, _ in rows])
        return embeds, torch.stack([F.pad(row_mask, (longest - len(row_mask), 0)) for _, row_mask in rows])
