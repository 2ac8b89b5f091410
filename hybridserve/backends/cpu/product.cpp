// The product kernel of product.h.
#include "product.h"

namespace hybridserve {

namespace {

// Most rows of x in a tile, and up to how many rows bf16 weights are widened on every use instead of once into a panel.
constexpr int64_t TILE_X = 4;
constexpr int64_t DIRECT_ROWS = 16;

// Weight rows in a tile with nx rows of x: its sums and operands fill the vector registers.
constexpr int tile_height(int nx) { return LANES == 16 ? (nx == 1 ? 8 : 6) : nx <= 2 ? 4 : 3; }

// A block of K: where it begins in x and in the weight rows, and its length. The first one sets sums, the others add.
struct Block {
    int64_t x_start, w_start, size;
};

// sums[j, i] (+)= w[n + i] . x[j] over a block; x, sums: those of the tile.
template <int NX, class W>
void multiply_tile(const WeightRows<W> &w, int64_t n, const float *x, int64_t x_stride, const Block &block, float *sums,
                   int64_t sum_stride) {
    constexpr int NW = tile_height(NX);
    // Past the end the last row is repeated.
    const W *row[NW];
    for (int i = 0; i < NW; i++)
        row[i] = w.row[smaller(n + i, w.count - 1)] + block.w_start;
    x += block.x_start;
    vf acc[NX][NW] = {};
    int64_t whole = block.size / PAIR * PAIR;
    for (int64_t p = 0; p < whole; p += PAIR) {
        vf half[NW];
        for (int i = 0; i < NW; i++) {
            __builtin_prefetch(row[i] + w.ahead + p);
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
    if (whole < block.size)
        for (int i = 0; i < NW; i++) {
            pair rest = load_pair_first(row[i] + whole, block.size - whole);
            for (int j = 0; j < NX; j++) {
                acc[j][i] = fma(rest.first, load(x + j * x_stride + whole), acc[j][i]);
                acc[j][i] = fma(rest.second, load(x + j * x_stride + whole + LANES), acc[j][i]);
            }
        }
    for (int j = 0; j < NX; j++)
        for (int i = 0; i < NW; i += 4) {
            // The last four overlap if the height is no multiple of four.
            int64_t at[4] = {i, smaller(i + 1, NW - 1), smaller(i + 2, NW - 1), smaller(i + 3, NW - 1)};
            v4 total = sum_lanes(acc[j][at[0]], acc[j][at[1]], acc[j][at[2]], acc[j][at[3]]);
            for (int m = 0; m < 4 && i + m < NW; m++) {
                float *sum = sums + j * sum_stride + i + m;
                *sum = block.x_start > 0 ? *sum + total[m] : total[m];
            }
        }
}

template <int NX, class W>
void multiply_tiles(const WeightRows<W> &w, const float *x, int64_t x_stride, const Block &block, float *sums, int64_t sum_stride) {
    for (int64_t n = 0; n < w.count; n += tile_height(NX))
        multiply_tile<NX>(w, n, x, x_stride, block, sums + n, sum_stride);
}

template <class W> void multiply_block(const WeightRows<W> &w, const XRows &x, const Block &block, const Sums &sums) {
    for (int64_t m = 0; m < x.count; m += TILE_X) {
        const float *rows = x.data + m * x.stride;
        float *out = sums.data + m * sums.stride;
        switch (x.count - m) {
        case 1: multiply_tiles<1>(w, rows, x.stride, block, out, sums.stride); break;
        case 2: multiply_tiles<2>(w, rows, x.stride, block, out, sums.stride); break;
        case 3: multiply_tiles<3>(w, rows, x.stride, block, out, sums.stride); break;
        default: multiply_tiles<4>(w, rows, x.stride, block, out, sums.stride);
        }
    }
}

void multiply_widened(const WeightRows<bf16> &w, const XRows &x, const Block &block, float *panel, const Sums &sums) {
    for (int64_t n = 0; n < w.count; n++)
        for (int64_t p = 0; p < block.size; p += PAIR) {
            const bf16 *from = w.row[n] + block.w_start + p;
            __builtin_prefetch(from + w.ahead);
            pair entries = block.size - p >= PAIR ? load_pair(from) : load_pair_first(from, block.size - p);
            store(panel + n * PANEL_STRIDE + p, entries.first);
            store(panel + n * PANEL_STRIDE + p + LANES, entries.second);
        }
    multiply_block(WeightRows<float>::strided(panel, PANEL_STRIDE, w.count), x, {block.x_start, 0, round_up(block.size, PAIR)}, sums);
}

} // namespace

void multiply(const WeightRows<float> &w, const XRows &x, int64_t k, float *, const Sums &sums) {
    for (int64_t k0 = 0; k0 < k; k0 += K_BLOCK)
        multiply_block(w, x, {k0, k0, smaller(K_BLOCK, k - k0)}, sums);
}
void multiply(const WeightRows<bf16> &w, const XRows &x, int64_t k, float *panel, const Sums &sums) {
    for (int64_t k0 = 0; k0 < k; k0 += K_BLOCK) {
        Block block{k0, k0, smaller(K_BLOCK, k - k0)};
        if (x.count > DIRECT_ROWS)
            multiply_widened(w, x, block, panel, sums);
        else
            multiply_block(w, x, block, sums);
    }
}

} // namespace hybridserve
