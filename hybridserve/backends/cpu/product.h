// Products of rows with a weight matrix, the core of linear.cpp and moe.cpp. Knows dot products of rows; owns no threads.
//
// The sum behind one output is always the same: K in blocks of K_BLOCK, one chain of LANES multiply-adds through each block, lanes
// summed by sum_lanes(), blocks added left to right. So an output does not depend on how many rows are multiplied at once.
#pragma once

#include "numeric.h"

namespace hybridserve {

constexpr int64_t PAIR = 2 * LANES;
constexpr int64_t K_BLOCK = 1024;
// Weight rows that are read together while they are in cache; every tile's height divides it.
constexpr int64_t PANEL_W = 24;
// Most rows of x in a tile, and up to how many rows bf16 weights are widened on every use instead of once into a panel.
constexpr int64_t TILE_X = 4;
constexpr int64_t DIRECT_ROWS = 16;
// Rows are too short for the hardware to foresee the next ones: asking for them doubles the bandwidth of one row.
constexpr int64_t PREFETCH_ROWS = 8;

// Weight rows in a tile with nx rows of x: its sums and operands fill the vector registers.
constexpr int tile_height(int nx) { return LANES == 16 ? (nx == 1 ? 8 : 6) : nx == 1 ? 4 : nx == 2 ? 4 : 3; }

// sums[j * PANEL_W + i] (+)= w[i] . x[j] over k entries for i < count; x is padded with zeros to whole pairs, w is not.
template <int NX, class W>
static inline void multiply_tile(const W *w, int64_t w_stride, int64_t count, const float *x, int64_t x_stride, int64_t k, float *sums, bool add) {
    constexpr int NW = tile_height(NX);
    // Past the end the last row is repeated: sums has room for whole tiles.
    const W *row[NW];
    for (int i = 0; i < NW; i++)
        row[i] = w + smaller(i, count - 1) * w_stride;
    vf acc[NX][NW] = {};
    int64_t ahead = PREFETCH_ROWS * w_stride;
    int64_t whole = k / PAIR * PAIR;
    for (int64_t p = 0; p < whole; p += PAIR) {
        vf half[NW];
        for (int i = 0; i < NW; i++) {
            __builtin_prefetch(row[i] + ahead + p);
            half[i] = load_pair(row[i] + p).first;
        }
        for (int j = 0; j < NX; j++) {
            vf xv = load(x + j * x_stride + p);
            for (int i = 0; i < NW; i++)
                acc[j][i] = fma(half[i], xv, acc[j][i]);
        }
        for (int i = 0; i < NW; i++)
            half[i] = load_pair(row[i] + p).second;
        for (int j = 0; j < NX; j++) {
            vf xv = load(x + j * x_stride + p + LANES);
            for (int i = 0; i < NW; i++)
                acc[j][i] = fma(half[i], xv, acc[j][i]);
        }
    }
    if (whole < k)
        for (int i = 0; i < NW; i++) {
            pair rest = load_pair_first(row[i] + whole, k - whole);
            for (int j = 0; j < NX; j++) {
                acc[j][i] = fma(rest.first, load(x + j * x_stride + whole), acc[j][i]);
                acc[j][i] = fma(rest.second, load(x + j * x_stride + whole + LANES), acc[j][i]);
            }
        }
    for (int j = 0; j < NX; j++)
        for (int i = 0; i < NW; i += 4) {
            // The last four overlap the ones before if the height is no multiple of four.
            int64_t at[4] = {i, smaller(i + 1, NW - 1), smaller(i + 2, NW - 1), smaller(i + 3, NW - 1)};
            v4 total = sum_lanes(acc[j][at[0]], acc[j][at[1]], acc[j][at[2]], acc[j][at[3]]);
            for (int n = 0; n < 4 && i + n < NW; n++) {
                float *sum = sums + j * PANEL_W + i + n;
                *sum = add ? *sum + total[n] : total[n];
            }
        }
}

template <int NX, class W>
static inline void multiply_tiles(const W *w, int64_t w_stride, int64_t count, const float *x, int64_t x_stride, int64_t k, float *sums, bool add) {
    for (int64_t n = 0; n < count; n += tile_height(NX))
        multiply_tile<NX>(w + n * w_stride, w_stride, count - n, x, x_stride, k, sums + n, add);
}

template <class W>
static inline void multiply_rows(const W *w, int64_t w_stride, int64_t count, const float *x, int64_t x_stride, int64_t rows, int64_t k, float *sums,
                                 bool add) {
    for (int64_t m = 0; m < rows; m += TILE_X) {
        const float *xs = x + m * x_stride;
        float *out = sums + m * PANEL_W;
        switch (rows - m) {
        case 1: multiply_tiles<1>(w, w_stride, count, xs, x_stride, k, out, add); break;
        case 2: multiply_tiles<2>(w, w_stride, count, xs, x_stride, k, out, add); break;
        case 3: multiply_tiles<3>(w, w_stride, count, xs, x_stride, k, out, add); break;
        default: multiply_tiles<4>(w, w_stride, count, xs, x_stride, k, out, add);
        }
    }
}

static inline void multiply_block(const float *w, int64_t w_stride, int64_t count, const float *x, int64_t x_stride, int64_t rows, int64_t k, float *,
                                  float *sums, bool add) {
    multiply_rows(w, w_stride, count, x, x_stride, rows, k, sums, add);
}
static inline void multiply_block(const bf16 *w, int64_t w_stride, int64_t count, const float *x, int64_t x_stride, int64_t rows, int64_t k,
                                  float *panel, float *sums, bool add) {
    if (rows <= DIRECT_ROWS)
        return multiply_rows(w, w_stride, count, x, x_stride, rows, k, sums, add);
    for (int64_t n = 0; n < count; n++)
        for (int64_t p = 0; p < k; p += PAIR) {
            const bf16 *from = w + n * w_stride + p;
            __builtin_prefetch(from + PREFETCH_ROWS * w_stride);
            pair widened = k - p >= PAIR ? load_pair(from) : load_pair_first(from, k - p);
            store(panel + n * K_BLOCK + p, widened.first);
            store(panel + n * K_BLOCK + p + LANES, widened.second);
        }
    multiply_rows<float>(panel, K_BLOCK, count, x, x_stride, rows, round_up(k, PAIR), sums, add);
}

// sums[m * PANEL_W + n] = w[n] . x[m] for count <= PANEL_W weight rows and any number of rows of x, which widen_row() made.
// panel: scratch of PANEL_W * K_BLOCK floats.
template <class W>
static void multiply_panel(const W *w, int64_t w_stride, int64_t count, const float *x, int64_t x_stride, int64_t rows, int64_t k, float *panel,
                           float *sums) {
    for (int64_t k0 = 0; k0 < k; k0 += K_BLOCK)
        multiply_block(w + k0, w_stride, count, x + k0, x_stride, rows, smaller(K_BLOCK, k - k0), panel, sums, k0 > 0);
}

// One row of x as fp32 for products with weights of type W: in the order of W's pairs, padded with zeros to whole pairs.
template <class W, class X> static inline void widen_row(const X *row, int64_t k, float *out) {
    constexpr bool even_odd = sizeof(W) == 2;
    for (int64_t p = 0; p < k; p += PAIR) {
        float entries[PAIR] = {};
        for (int64_t i = 0; i < smaller(PAIR, k - p); i++)
            entries[even_odd ? i / 2 + i % 2 * LANES : i] = to_float(row[p + i]);
        memcpy(out + p, entries, sizeof entries);
    }
}
template <> inline void widen_row<bf16, bf16>(const bf16 *row, int64_t k, float *out) {
    for (int64_t p = 0; p < k; p += PAIR) {
        pair entries = k - p >= PAIR ? load_pair(row + p) : load_pair_first(row + p, k - p);
        store(out + p, entries.first);
        store(out + p + LANES, entries.second);
    }
}

} // namespace hybridserve
