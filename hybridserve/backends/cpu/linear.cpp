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

template <class X, class W> void widen(const Problem &p, int64_t first, const XRows &x, float *memory) {
    const X *from = static_cast<const X *>(p.x) + first * p.x_stride;
    if (p.threads == 1 || x.count * p.k <= 32768) {
        for (int64_t m = 0; m < x.count; m++)
            widen_row<W>(from + m * p.x_stride, p.k, memory + m * x.stride);
        return;
    }
#pragma omp parallel for num_threads(p.threads)
    for (int64_t m = 0; m < x.count; m++)
        widen_row<W>(from + m * p.x_stride, p.k, memory + m * x.stride);
}

template <class X, class W> void write(const Problem &p, const Sums &sums, int64_t first_row, int64_t rows, int64_t n, int64_t count) {
    const W *bias = static_cast<const W *>(p.bias);
    for (int64_t m = 0; m < rows; m++) {
        X *out = static_cast<X *>(p.out) + (first_row + m) * p.n + n;
        for (int64_t i = 0; i < count; i += LANES) {
            int64_t left = count - i;
            vf y = load_some(sums.data + m * sums.stride + i, left);
            if (bias != nullptr)
                y += load_some(bias + n + i, left);
            store_some(out + i, y, left);
        }
    }
}

template <class X, class W> void multiply_panel(const Problem &p, const XRows &x, int64_t first, int64_t index, Scratch &scratch) {
    float *panel = scratch.floats(PANEL_SIZE + x.count * PANEL_W);
    Sums sums{panel + PANEL_SIZE, PANEL_W};
    int64_t n = index * PANEL_W, count = smaller(PANEL_W, p.n - n);
    const W *w = static_cast<const W *>(p.w) + n * p.w_stride;
    multiply(WeightRows<W>::strided(w, p.w_stride, count), x, p.k, panel, sums);
    write<X, W>(p, sums, first, x.count, n, count);
}

template <class X, class W> void linear(const Problem &p) {
    static thread_local Scratch x_scratch;
    int64_t stride = x_stride_for(p.k), panels = (p.n + PANEL_W - 1) / PANEL_W;
    float *memory = x_scratch.floats(smaller(ROW_BLOCK, p.rows) * stride);
    for (int64_t first = 0; first < p.rows; first += ROW_BLOCK) {
        XRows x{memory, stride, smaller(ROW_BLOCK, p.rows - first)};
        widen<X, W>(p, first, x, memory);
#pragma omp parallel num_threads(p.threads) if (p.threads > 1 && p.n * p.k * x.count > 65536)
        {
            FlushDenormals flush;
            static thread_local Scratch scratch;
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < panels; i++)
                multiply_panel<X, W>(p, x, first, i, scratch);
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
