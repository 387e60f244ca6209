"""A router's choice of experts, forward and backward: scores, the K best with the lowest index first, and weights.

A program holds whole rows of scores in registers and takes the best K times; rows are few bytes, so nothing else
counts. Backward computes the scores again from the logits and needs nothing but the choice.

Legend: N rows, E experts, K of them chosen, G groups; suffix _RE is a tile [ROWS, experts], _RG [ROWS, groups], _RK
[ROWS, slots], _R one value a row. Experts lie in a tile group by group, padded to powers of two.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _places(E, GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr, PADDED_SIZE: tl.constexpr):
    """Expert of every column of a tile, and whether there is one."""
    column = tl.arange(0, PADDED_GROUPS * PADDED_SIZE)
    size = E // GROUPS
    group, within = column // PADDED_SIZE, column % PADDED_SIZE
    return group * size + within, (group < GROUPS) & (within < size)


@triton.jit
def _scores(z_RE, exists_E, ACTIVATION: tl.constexpr):
    """Scores of logits, fp32; 0 where there is no expert."""
    if ACTIVATION == "softmax":
        z_RE = tl.where(exists_E[None, :], z_RE, -float("inf"))
        e_RE = tl.exp(z_RE - tl.max(z_RE, axis=1)[:, None])
        s_RE = e_RE / tl.sum(e_RE, axis=1)[:, None]
    elif ACTIVATION == "sigmoid":
        s_RE = tl.sigmoid(z_RE)
    else:
        tl.static_assert(ACTIVATION == "sqrt_softplus")
        s_RE = tl.sqrt(_softplus(z_RE))
    return tl.where(exists_E[None, :], s_RE, 0.0)


@triton.jit
def _softplus(z):
    """log(1 + e^z) without overflow, and without losing e^z of a very negative z."""
    e = tl.exp(-tl.abs(z))
    # log(1 + e) loses e below fp32's resolution: its series takes over
    return tl.maximum(z, 0.0) + tl.where(e < 1e-4, e - 0.5 * e * e, tl.log(1.0 + e))


@triton.jit
def _best(keys_RE, column_E):
    """Column of the largest key of each row, the first of equal ones."""
    best_R = tl.max(keys_RE, axis=1)
    return tl.min(tl.where(keys_RE == best_R[:, None], column_E[None, :], 1 << 30), axis=1)


@triton.jit
def _only_best_groups(
    keys_RE, exists_E, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, BY_TWO: tl.constexpr,
    ROWS: tl.constexpr, PADDED_GROUPS: tl.constexpr, PADDED_SIZE: tl.constexpr,
):  # fmt: skip
    """Keys with those of other groups far below any other, yet above those of experts that do not exist.

    One group after another by masks: compiled for Hopper, a reshape to [ROWS, groups, size] gave other results from
    run to run.
    """
    column_E = tl.arange(0, PADDED_GROUPS * PADDED_SIZE)
    number_G = tl.arange(0, PADDED_GROUPS)
    group_RG = tl.full((ROWS, PADDED_GROUPS), -float("inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        own_RE = tl.where((column_E // PADDED_SIZE == group)[None, :], keys_RE, -float("inf"))
        best_R = tl.max(own_RE, axis=1)
        if BY_TWO:
            others_RE = tl.where(column_E[None, :] == _best(own_RE, column_E)[:, None], -float("inf"), own_RE)
            best_R += tl.max(others_RE, axis=1)
        group_RG = tl.where((number_G == group)[None, :], best_R[:, None], group_RG)
    kept_RE = tl.zeros((ROWS, PADDED_GROUPS * PADDED_SIZE), tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        best_R = _best(group_RG, number_G)
        kept_RE = tl.where((column_E // PADDED_SIZE)[None, :] == best_R[:, None], 1, kept_RE)
        group_RG = tl.where(number_G[None, :] == best_R[:, None], -float("inf"), group_RG)
    return tl.where((kept_RE == 0) & exists_E[None, :], -3.0e38, keys_RE)


@triton.jit
def _forward_kernel(
    logits_ptr, bias_ptr, scores_ptr, index_ptr,
    N, E, K,
    ACTIVATION: tl.constexpr, BIAS: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    BY_TWO: tl.constexpr, RENORMALISE: tl.constexpr, SUM_EPS: tl.constexpr, SCALE: tl.constexpr,
    ROWS: tl.constexpr, PADDED_GROUPS: tl.constexpr, PADDED_SIZE: tl.constexpr, PADDED_K: tl.constexpr,
):  # fmt: skip
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert_E, exists_E = _places(E, GROUPS, PADDED_GROUPS, PADDED_SIZE)
    inside_RE = (row_R < N)[:, None] & exists_E[None, :]
    z_RE = tl.load(logits_ptr + row_R[:, None] * E + expert_E[None, :], mask=inside_RE, other=0.0).to(tl.float32)
    s_RE = _scores(z_RE, exists_E, ACTIVATION)
    # without a bias scores order as their logits do, and those are not rounded
    keys_RE = z_RE
    if BIAS or (GROUPS > 1 and BY_TWO):
        keys_RE = s_RE
    if BIAS:
        keys_RE += tl.load(bias_ptr + expert_E, mask=exists_E, other=0.0).to(tl.float32)[None, :]
    # minus infinity and NaN are chosen last, but before experts of other groups and places without an expert
    keys_RE = tl.where(keys_RE > -1.0e38, keys_RE, -1.0e38)
    keys_RE = tl.where(exists_E[None, :], keys_RE, -float("inf"))
    if GROUPS > 1:
        keys_RE = _only_best_groups(keys_RE, exists_E, GROUPS, TOP_GROUPS, BY_TWO, ROWS, PADDED_GROUPS, PADDED_SIZE)

    column_E = tl.arange(0, PADDED_GROUPS * PADDED_SIZE)
    slot_K = tl.arange(0, PADDED_K)
    weight_RK = tl.zeros((ROWS, PADDED_K), tl.float32)
    for slot in range(0, K):
        chosen_R = tl.minimum(_best(keys_RE, column_E), PADDED_GROUPS * PADDED_SIZE - 1)
        is_chosen_RE = column_E[None, :] == chosen_R[:, None]
        weight_R = tl.sum(tl.where(is_chosen_RE, s_RE, 0.0), axis=1)
        weight_RK = tl.where(slot_K[None, :] == slot, weight_R[:, None], weight_RK)
        number_R = tl.sum(tl.where(is_chosen_RE, expert_E[None, :], 0), axis=1)
        tl.store(index_ptr + row_R * K + slot, number_R.to(tl.int64), mask=row_R < N)
        keys_RE = tl.where(is_chosen_RE, -float("inf"), keys_RE)
    if RENORMALISE:
        weight_RK = weight_RK / (tl.sum(weight_RK, axis=1) + SUM_EPS)[:, None]
    weight_RK *= SCALE
    at_RK = row_R[:, None] * K + slot_K[None, :]
    tl.store(
        scores_ptr + at_RK, weight_RK.to(scores_ptr.dtype.element_ty), mask=(row_R < N)[:, None] & (slot_K < K)[None, :]
    )


@triton.jit
def _backward_kernel(
    dscores_ptr, logits_ptr, index_ptr, dlogits_ptr,
    N, E, K,
    ACTIVATION: tl.constexpr, RENORMALISE: tl.constexpr, SUM_EPS: tl.constexpr, SCALE: tl.constexpr,
    ROWS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert_E = tl.arange(0, PADDED)
    exists_E = expert_E < E
    inside_RE = (row_R < N)[:, None] & exists_E[None, :]
    at_RE = row_R[:, None] * E + expert_E[None, :]
    z_RE = tl.load(logits_ptr + at_RE, mask=inside_RE, other=0.0).to(tl.float32)
    s_RE = _scores(z_RE, exists_E, ACTIVATION)
    # what flows into every expert's score, and which were chosen
    ds_RE = tl.zeros((ROWS, PADDED), tl.float32)
    chosen_RE = tl.zeros((ROWS, PADDED), tl.int32)
    for slot in range(0, K):
        index_R = tl.load(index_ptr + row_R * K + slot, mask=row_R < N, other=-1)
        given_R = tl.load(dscores_ptr + row_R * K + slot, mask=row_R < N, other=0.0).to(tl.float32)
        is_chosen_RE = expert_E[None, :] == index_R[:, None]
        ds_RE = tl.where(is_chosen_RE, SCALE * given_R[:, None], ds_RE)
        chosen_RE = tl.where(is_chosen_RE, 1, chosen_RE)
    if RENORMALISE:
        sum_R = tl.sum(tl.where(chosen_RE != 0, s_RE, 0.0), axis=1) + SUM_EPS
        along_R = tl.sum(ds_RE * s_RE, axis=1) / sum_R
        ds_RE = tl.where(chosen_RE != 0, (ds_RE - along_R[:, None]) / sum_R[:, None], 0.0)
    if ACTIVATION == "softmax":
        dz_RE = s_RE * (ds_RE - tl.sum(ds_RE * s_RE, axis=1)[:, None])
    elif ACTIVATION == "sigmoid":
        dz_RE = ds_RE * s_RE * (1.0 - s_RE)
    else:
        # of sqrt(softplus): sigmoid / (2 sqrt(softplus)), which is sqrt(e^z) / 2 far below zero
        dz_RE = tl.where(s_RE > 0.0, ds_RE * tl.sigmoid(z_RE) / (2.0 * tl.where(s_RE > 0.0, s_RE, 1.0)), 0.0)
    tl.store(dlogits_ptr + at_RE, dz_RE.to(dlogits_ptr.dtype.element_ty), mask=inside_RE)


def traits(spec):
    """Backward reads the choice, which is an output."""
    return {"saved_outputs": ("index",)}


def bucket(tensors, spec):
    """Configurations depend on the number of experts only."""
    return {"experts": tensors["logits"].shape[-1]}


def outputs_like(tensors, spec, config):
    """Empty scores [N, K] in the dtype of the logits and index [N, K] int64, which is also saved."""
    logits = tensors["logits"]
    shape = (logits.shape[0], tensors["slots"].shape[0])
    index = logits.new_empty(shape, dtype=torch.int64)
    return {"scores": logits.new_empty(shape), "index": index}, {"index": index}


def next_power(size):
    """The least power of two that is not smaller."""
    return 1 << (size - 1).bit_length()


def forward(tensors, spec, config):
    """scores and index; the index is saved."""
    outputs, saved = outputs_like(tensors, spec, config)
    logits = tensors["logits"]
    rows, experts = logits.shape
    count = tensors["slots"].shape[0]
    if rows > 0:
        _forward_kernel[(-(-rows // config["rows"]),)](
            logits,
            tensors["bias"] if spec.bias else None,
            outputs["scores"],
            outputs["index"],
            rows,
            experts,
            count,
            ACTIVATION=spec.activation,
            BIAS=spec.bias,
            GROUPS=spec.groups,
            TOP_GROUPS=spec.top_groups,
            BY_TWO=spec.group_score == "top2",
            RENORMALISE=spec.renormalise,
            SUM_EPS=spec.sum_eps,
            SCALE=spec.scale,
            ROWS=config["rows"],
            PADDED_GROUPS=next_power(spec.groups),
            PADDED_SIZE=next_power(experts // spec.groups),
            PADDED_K=next_power(count),
            num_warps=config["num_warps"],
        )
    return outputs, saved


def backward(tensors, saved, grads, needs, spec, config):
    """The gradient of the logits."""
    logits = tensors["logits"]
    rows, experts = logits.shape
    dlogits = torch.empty_like(logits)
    if rows > 0:
        _backward_kernel[(-(-rows // config["rows"]),)](
            grads["scores"],
            logits,
            saved["index"],
            dlogits,
            rows,
            experts,
            saved["index"].shape[1],
            ACTIVATION=spec.activation,
            RENORMALISE=spec.renormalise,
            SUM_EPS=spec.sum_eps,
            SCALE=spec.scale,
            ROWS=config["rows"],
            PADDED=next_power(experts),
            num_warps=config["num_warps"],
        )
    return {"logits": dlogits}
