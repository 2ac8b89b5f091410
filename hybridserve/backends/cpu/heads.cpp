// Each head by a matrix of its own, y = x w, with w stored by inputs. Called through ctypes by heads.py.
//
// Outputs lie across the lanes and inputs are added one after the other, so an output's sum has one order whatever the number of rows.
#include "numeric.h"

using namespace hybridserve;

namespace {

// Rows and vectors of outputs whose sums are in registers together.
constexpr int TILE_ROWS = 4;
constexpr int VECTORS = 3;
constexpr int64_t PANEL = VECTORS * LANES;

struct Problem {
    elements x, w;
    int64_t x_row, x_head, w_head, w_input;
    void *out; // [rows, heads, outputs]
    bool out_is_bf16;
    int64_t rows, heads, outputs, inputs;
};

// R rows by one panel. x: [R, inputs]; panel: [inputs, PANEL].
template <int R> void multiply_tile(const Problem &p, const float *x, const float *panel, int64_t row, int64_t head, int64_t first) {
    vf sums[R][VECTORS] = {};
    for (int64_t i = 0; i < p.inputs; i++) {
        vf w[VECTORS];
        for (int v = 0; v < VECTORS; v++)
            w[v] = load(panel + i * PANEL + v * LANES);
        for (int r = 0; r < R; r++) {
            vf factor = splat(x[r * p.inputs + i]);
            for (int v = 0; v < VECTORS; v++)
                sums[r][v] = fma(factor, w[v], sums[r][v]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < VECTORS && first + v * LANES < p.outputs; v++) {
            int64_t at = first + v * LANES;
            store_elements(p.out, p.out_is_bf16, ((row + r) * p.heads + head) * p.outputs + at, sums[r][v], p.outputs - at);
        }
}

void multiply_panel(const Problem &p, int64_t head, int64_t first, Scratch &scratch) {
    // Rows are widened whole vectors at a time: the last may reach beyond its end, where the next one begins.
    float *panel = scratch.floats(p.inputs * (PANEL + TILE_ROWS) + LANES), *x = panel + p.inputs * PANEL;
    for (int64_t i = 0; i < p.inputs; i++)
        for (int v = 0; v < VECTORS; v++) {
            int64_t left = p.outputs - first - v * LANES;
            store(panel + i * PANEL + v * LANES, left > 0 ? p.w.some(head * p.w_head + i * p.w_input + first + v * LANES, left) : vf{});
        }
    for (int64_t row = 0; row < p.rows; row += TILE_ROWS) {
        int64_t count = smaller(TILE_ROWS, p.rows - row);
        for (int64_t r = 0; r < count; r++)
            p.x.widen((row + r) * p.x_row + head * p.x_head, p.inputs, x + r * p.inputs);
        switch (count) {
        case 1: multiply_tile<1>(p, x, panel, row, head, first); break;
        case 2: multiply_tile<2>(p, x, panel, row, head, first); break;
        case 3: multiply_tile<3>(p, x, panel, row, head, first); break;
        default: multiply_tile<4>(p, x, panel, row, head, first);
        }
    }
}

} // namespace

// x: [rows, heads, inputs] with strides of rows and heads; w: [heads, inputs, outputs] with strides of heads and inputs; both dense in the
// last dimension. out: [rows, heads, outputs] contiguous.
extern "C" void hs_head_linear(const void *x, int32_t x_is_bf16, int64_t x_row, int64_t x_head, const void *w, int32_t w_is_bf16, int64_t w_head,
                               int64_t w_input, void *out, int32_t out_is_bf16, int64_t rows, int64_t heads, int64_t outputs, int64_t inputs,
                               int32_t threads) {
    Problem p{{x, x_is_bf16 != 0}, {w, w_is_bf16 != 0}, x_row, x_head, w_head, w_input, out, out_is_bf16 != 0, rows, heads, outputs, inputs};
    int64_t panels = (outputs + PANEL - 1) / PANEL;
#pragma omp parallel num_threads(threads) if (threads > 1 && rows * heads * outputs * inputs > 65536)
    {
        FlushDenormals flush;
        static thread_local Scratch scratch;
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < heads * panels; item++)
            multiply_panel(p, item / panels, item % panels * PANEL, scratch);
    }
}
