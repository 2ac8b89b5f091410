// y = x w^T + bias for few or many rows, bf16 or fp32 each, sums in fp32. Called through ctypes by linear.py.
#include "product.h"

using namespace hybridserve;

namespace {

// Rows of x that stay in the outer cache while all weights pass by.
constexpr int64_t ROW_BLOCK = 256;

struct Problem {
    const void *x, *w, *bias;
    void *out;
    int64_t x_stride, w_stride, rows, n, k;
    int threads;
};

template <class X, class W> const float *widened(const Problem &p, float *memory, int64_t padded, int64_t first, int64_t rows) {
    const X *x = static_cast<const X *>(p.x) + first * p.x_stride;
#pragma omp parallel for num_threads(p.threads) if (rows * padded > 32768)
    for (int64_t m = 0; m < rows; m++)
        widen_row<W>(x + m * p.x_stride, p.k, memory + m * padded);
    return memory;
}

template <class X, class W>
void write_panel(const Problem &p, const float *sums, int64_t first_row, int64_t rows, int64_t n, int64_t count) {
    const W *bias = static_cast<const W *>(p.bias);
    for (int64_t m = 0; m < rows; m++) {
        X *out = static_cast<X *>(p.out) + (first_row + m) * p.n + n;
        for (int64_t i = 0; i < count; i += LANES) {
            int64_t left = count - i;
            vf y = load_some(sums + m * PANEL_W + i, left);
            if (bias != nullptr)
                y += load_some(bias + n + i, left);
            store_some(out + i, y, left);
        }
    }
}

template <class X, class W> void linear(const Problem &p) {
    static thread_local Scratch x_scratch;
    int64_t padded = round_up(p.k, PAIR), most = smaller(ROW_BLOCK, p.rows);
    float *memory = x_scratch.floats(most * padded);
    const W *w = static_cast<const W *>(p.w);
    int64_t panels = (p.n + PANEL_W - 1) / PANEL_W;
    for (int64_t first = 0; first < p.rows; first += ROW_BLOCK) {
        int64_t rows = smaller(ROW_BLOCK, p.rows - first);
        const float *x = widened<X, W>(p, memory, padded, first, rows);
#pragma omp parallel num_threads(p.threads) if (p.n * p.k * rows > 65536)
        {
            static thread_local Scratch scratch;
            float *panel = scratch.floats(PANEL_W * K_BLOCK + rows * PANEL_W), *sums = panel + PANEL_W * K_BLOCK;
#pragma omp for schedule(dynamic)
            for (int64_t block = 0; block < panels; block++) {
                int64_t n = block * PANEL_W, count = smaller(PANEL_W, p.n - n);
                multiply_panel(w + n * p.w_stride, p.w_stride, count, x, padded, rows, p.k, panel, sums);
                write_panel<X, W>(p, sums, first, rows, n, count);
            }
        }
    }
}

} // namespace

// x: [rows, k] with row stride; w: [n, k] with row stride; bias: [n] of w's type or null; out: [rows, n] contiguous of x's type.
extern "C" void hs_linear(const void *x, int64_t x_stride, int32_t x_is_bf16, const void *w, int64_t w_stride, int32_t w_is_bf16, const void *bias,
                          void *out, int64_t rows, int64_t n, int64_t k, int32_t threads) {
    Problem p{x, w, bias, out, x_stride, w_stride, rows, n, k, threads};
    if (x_is_bf16)
        w_is_bf16 ? linear<bf16, bf16>(p) : linear<bf16, float>(p);
    else
        w_is_bf16 ? linear<float, bf16>(p) : linear<float, float>(p);
}
