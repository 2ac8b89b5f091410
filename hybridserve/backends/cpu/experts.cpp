// Experts: each row's sum over its experts of weight * down(act(gate x) * up x), or of weight * down(act(up x)) without a gate. Called
// through ctypes by experts.py.
//
// Rows of one expert are multiplied together, which does not change their sums (see product.h), and a row's experts are added in the
// order of its choices: neighbours do not change a row's result.
#include "activation.h"
#include "product.h"

#include <vector>

using namespace hybridserve;

namespace {

// Rows of the batch that are taken together: this bounds the memory for what their experts make.
constexpr int64_t ROW_BLOCK = 512;

struct Experts {
    elements x;
    int64_t x_row;
    const int64_t *ids; // [T, choices]
    elements weights;
    const void *gate_up, *down;        // [E, 2 inner or inner, size]; [E, size, inner]
    elements gate_up_bias, down_bias; // [E, 2 inner or inner]; [E, size]; or without data
    int64_t gate_up_expert, gate_up_row, down_expert, down_row;
    void *out;
    int64_t rows, choices, num_experts, size, inner;
    bool gated;
    int activation;
    float limit, up_shift; // gate at most limit, up within it, then shifted; infinity for no limit
    int threads;

    int64_t gate_up_rows() const { return gated ? 2 * inner : inner; }
    int64_t inner_step() const { return gated ? PANEL_W / 2 : PANEL_W; }
};

// A piece of work: some weight rows of one expert, whose pairs of (row, choice) are order[first] to order[first + count - 1].
struct Piece {
    int64_t expert, first, count, start;
};

struct Assignment {
    std::vector<int64_t> order; // pairs by expert
    std::vector<Piece> experts; // those that have any, start 0

    Assignment(const Experts &e, int64_t first_row, int64_t rows) : order(rows * e.choices) {
        const int64_t *ids = e.ids + first_row * e.choices;
        std::vector<int64_t> ends(e.num_experts + 1, 0);
        for (size_t pair = 0; pair < order.size(); pair++)
            ends[ids[pair] + 1]++;
        for (int64_t expert = 0; expert < e.num_experts; expert++) {
            if (ends[expert + 1] > 0)
                experts.push_back({expert, ends[expert], ends[expert + 1], 0});
            ends[expert + 1] += ends[expert];
        }
        for (size_t pair = 0; pair < order.size(); pair++)
            order[ends[ids[pair]]++] = int64_t(pair);
    }

    std::vector<Piece> pieces(int64_t size, int64_t step) const {
        std::vector<Piece> result;
        for (Piece piece : experts)
            for (piece.start = 0; piece.start < size; piece.start += step)
                result.push_back(piece);
        return result;
    }
};

// Memory shared by the threads for one block of rows; pairs stand in the order of their experts.
struct Shared {
    float *x, *hidden, *each; // [pairs, x_stride], [pairs, hidden_stride], [pairs as in the batch, size]
    int64_t x_stride, hidden_stride;
};

// Products of one row with the first and, if there are gates, the second half of a piece's weight rows, to hidden entries.
void open_row(const Experts &e, const Piece &piece, int64_t count, float *left, float *up) {
    const elements &bias = e.gate_up_bias;
    int64_t first = piece.expert * e.gate_up_rows() + piece.start;
    for (int64_t i = 0; i < count; i += LANES) {
        int64_t some = count - i;
        vf l = load_some(left + i, some), u = e.gated ? load_some(up + i, some) : splat(1.0f);
        if (bias.data != nullptr)
            l = l + bias.some(first + i, some);
        if (e.gated) {
            if (bias.data != nullptr)
                u = u + bias.some(first + e.inner + i, some);
            l = choose(l > splat(e.limit), splat(e.limit), l);
            u = within(-e.limit, u, e.limit) + splat(e.up_shift);
        }
        store_some(left + i, activate(e.activation, l) * u, some);
    }
}

// hidden = act(gate x) * (up x), or act(up x), of some inner entries. Stored as widen_row<W>() would: it is the next product's x.
template <class W> void activate_piece(const Experts &e, const Shared &s, const Piece &piece, float *panel, float *sums) {
    int64_t count = smaller(e.inner_step(), e.inner - piece.start);
    const W *first = static_cast<const W *>(e.gate_up) + piece.expert * e.gate_up_expert + piece.start * e.gate_up_row;
    WeightRows<W> rows;
    rows.count = e.gated ? 2 * count : count;
    rows.ahead = PREFETCH_ROWS * e.gate_up_row;
    for (int64_t i = 0; i < count; i++) {
        rows.row[i] = first + i * e.gate_up_row;
        if (e.gated)
            rows.row[count + i] = first + (e.inner + i) * e.gate_up_row;
    }
    multiply(rows, XRows{s.x + piece.first * s.x_stride, s.x_stride, piece.count}, e.size, panel, {sums, PANEL_W});
    for (int64_t m = 0; m < piece.count; m++) {
        float *row = sums + m * PANEL_W, *hidden = s.hidden + (piece.first + m) * s.hidden_stride;
        open_row(e, piece, count, row, row + count);
        for (int64_t i = 0; i < count; i++) {
            int64_t at = piece.start + i, in_pair = at % PAIR;
            hidden[at - in_pair + (sizeof(W) == 2 ? in_pair / 2 + in_pair % 2 * LANES : in_pair)] = row[i];
        }
    }
}

template <class W> void project_piece(const Experts &e, const Shared &s, const Assignment &a, const Piece &piece, float *panel, float *sums) {
    int64_t count = smaller(PANEL_W, e.size - piece.start);
    const W *down = static_cast<const W *>(e.down) + piece.expert * e.down_expert + piece.start * e.down_row;
    XRows x{s.hidden + piece.first * s.hidden_stride, s.hidden_stride, piece.count};
    multiply(WeightRows<W>::strided(down, e.down_row, count), x, e.inner, panel, {sums, PANEL_W});
    for (int64_t m = 0; m < piece.count; m++) {
        float *each = s.each + a.order[piece.first + m] * e.size + piece.start;
        memcpy(each, sums + m * PANEL_W, count * 4);
        if (e.down_bias.data != nullptr)
            for (int64_t i = 0; i < count; i++)
                each[i] += e.down_bias.at(piece.expert * e.size + piece.start + i);
    }
}

template <class X> void combine_row(const Experts &e, const float *each, int64_t row) {
    for (int64_t i = 0; i < e.size; i += LANES) {
        vf y = {};
        for (int64_t choice = 0; choice < e.choices; choice++)
            y = fma(load_some(each + choice * e.size + i, e.size - i), splat(e.weights.at(row * e.choices + choice)), y);
        store_some(static_cast<X *>(e.out) + row * e.size + i, y, e.size - i);
    }
}

template <class X, class W> void run_rows(const Experts &e, int64_t first_row, int64_t rows, Scratch &memory) {
    Assignment a(e, first_row, rows);
    std::vector<Piece> opened = a.pieces(e.inner, e.inner_step()), projected = a.pieces(e.size, PANEL_W);
    int64_t pairs = int64_t(a.order.size()), longest = 0, num_opened = int64_t(opened.size()), num_projected = int64_t(projected.size());
    for (const Piece &piece : a.experts)
        longest = larger(longest, piece.count);
    Shared s;
    s.x_stride = x_stride_for(e.size);
    s.hidden_stride = x_stride_for(e.inner);
    s.x = memory.floats(pairs * (s.x_stride + s.hidden_stride + e.size));
    s.hidden = s.x + pairs * s.x_stride;
    s.each = s.hidden + pairs * s.hidden_stride;
#pragma omp parallel num_threads(e.threads) if (e.threads > 1 && pairs * e.size * e.inner > 65536)
    {
        FlushDenormals flush;
        static thread_local Scratch scratch;
        float *panel = scratch.floats(PANEL_SIZE + longest * PANEL_W), *sums = panel + PANEL_SIZE;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < pairs; i++) {
            const X *row = static_cast<const X *>(e.x.data) + (first_row + a.order[i] / e.choices) * e.x_row;
            widen_row<W>(row, e.size, s.x + i * s.x_stride);
            // The padding of what the next product reads; the rest is written whole.
            memset(s.hidden + i * s.hidden_stride + e.inner / PAIR * PAIR, 0, (s.hidden_stride - e.inner / PAIR * PAIR) * 4);
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_opened; i++)
            activate_piece<W>(e, s, opened[i], panel, sums);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_projected; i++)
            project_piece<W>(e, s, a, projected[i], panel, sums);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++)
            combine_row<X>(e, s.each + row * e.choices * e.size, first_row + row);
    }
}

template <class X, class W> void run(const Experts &e) {
    static thread_local Scratch memory;
    for (int64_t row = 0; row < e.rows; row += ROW_BLOCK)
        run_rows<X, W>(e, row, smaller(ROW_BLOCK, e.rows - row), memory);
}

} // namespace

// x: [T, size] with row stride; ids, weights: [T, choices] contiguous; gate_up: [E, 2 inner, size], or [E, inner, size] if not gated, and
// down: [E, size, inner] of one type, with strides of experts and rows; biases: contiguous or null; out: [T, size] contiguous, of x's type.
extern "C" void hs_moe(const void *x, int32_t x_is_bf16, int64_t x_row, const int64_t *ids, const void *weights, int32_t weights_is_bf16,
                       const void *gate_up, int64_t gate_up_expert, int64_t gate_up_row, const void *down, int64_t down_expert, int64_t down_row,
                       int32_t experts_are_bf16, const void *gate_up_bias, int32_t gate_up_bias_is_bf16, const void *down_bias,
                       int32_t down_bias_is_bf16, void *out, int64_t rows, int64_t choices, int64_t num_experts, int64_t size, int64_t inner,
                       int32_t gated, int32_t activation, float limit, float up_shift, int32_t threads) {
    Experts e{{x, x_is_bf16 != 0},
              x_row,
              ids,
              {weights, weights_is_bf16 != 0},
              gate_up,
              down,
              {gate_up_bias, gate_up_bias_is_bf16 != 0},
              {down_bias, down_bias_is_bf16 != 0},
              gate_up_expert,
              gate_up_row,
              down_expert,
              down_row,
              out,
              rows,
              choices,
              num_experts,
              size,
              inner,
              gated != 0,
              activation,
              limit,
              up_shift,
              threads};
    if (x_is_bf16)
        experts_are_bf16 ? run<bf16, bf16>(e) : run<bf16, float>(e);
    else
        experts_are_bf16 ? run<float, bf16>(e) : run<float, float>(e);
}
