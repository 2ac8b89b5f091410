// Products of rows with a weight matrix, the core of linear.cpp, experts.cpp and attention.cpp. Knows dot products; owns no threads.
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
// Rows are too short for the hardware to foresee the next ones: asking for them doubles the bandwidth of one row.
constexpr int64_t PREFETCH_ROWS = 8;
// Rows of x and of the panel are longer than a block, lest they all compete for the same lines of the cache.
constexpr int64_t PANEL_STRIDE = K_BLOCK + PAIR;
constexpr int64_t PANEL_SIZE = PANEL_W * PANEL_STRIDE;

constexpr int64_t x_stride_for(int64_t k) { return round_up(k, PAIR) + PAIR; }

// Up to PANEL_W weight rows; `ahead` entries after what is read now is what will be read soon.
template <class W> struct WeightRows {
    const W *row[PANEL_W];
    int64_t count, ahead;

    static WeightRows strided(const W *first, int64_t stride, int64_t count) {
        WeightRows rows;
        rows.count = count;
        rows.ahead = PREFETCH_ROWS * stride;
        for (int64_t i = 0; i < count; i++)
            rows.row[i] = first + i * stride;
        return rows;
    }
};

// Rows of x as widen_row() makes them.
struct XRows {
    const float *data;
    int64_t stride, count;
};

// Where products go: data[x row * stride + weight row], with room for whole tiles.
struct Sums {
    float *data;
    int64_t stride;
};

// sums[m, n] = w[n] . x[m] over k entries, for any number of rows of x. panel: scratch of PANEL_SIZE floats.
void multiply(const WeightRows<float> &w, const XRows &x, int64_t k, float *panel, const Sums &sums);
void multiply(const WeightRows<bf16> &w, const XRows &x, int64_t k, float *panel, const Sums &sums);

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
template <> inline void widen_row<float, float>(const float *row, int64_t k, float *out) {
    memcpy(out, row, k * 4);
    memset(out + k, 0, (round_up(k, PAIR) - k) * 4);
}

} // namespace hybridserve
