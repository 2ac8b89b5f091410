// RMS norms, plain and gated, fp32 inside. Called through ctypes by norms.py.
#include "activation.h"

using namespace hybridserve;

namespace {

// Rows of D entries in two dimensions, dense in the last.
struct Rows {
    elements data;
    int64_t outer_stride, inner_stride;

    int64_t at(int64_t row, int64_t inner) const { return row / inner * outer_stride + row % inner * inner_stride; }
};

// 1 / sqrt(mean of squares + eps); x is padded with zeros.
vf inverse_rms(const float *x, int64_t size, float eps) {
    vf sum = {};
    for (int64_t i = 0; i < size; i += LANES)
        sum = fma(load(x + i), load(x + i), sum);
    return splat(1.0f / sqrtf(sum_lanes(sum) / float(size) + eps));
}

} // namespace

// x: [outer, inner, size]; weight: [size] or null; out: contiguous, of x's type. With zero_centred the factor is 1 + weight, in fp32; else
// the norm is rounded to x's type before the weight.
extern "C" void hs_rms_norm(const void *x, int32_t x_is_bf16, int64_t outer_stride, int64_t inner_stride, const void *weight, int32_t weight_is_bf16,
                            float eps, int32_t zero_centred, void *out, int64_t outer, int64_t inner, int64_t size, int32_t threads) {
    Rows rows{{x, x_is_bf16 != 0}, outer_stride, inner_stride};
    elements factor{weight, weight_is_bf16 != 0};
#pragma omp parallel num_threads(threads) if (threads > 1 && outer * inner * size > 65536)
    {
        FlushDenormals flush;
        static thread_local Scratch scratch;
        float *wide = scratch.floats(size + LANES);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < outer * inner; row++) {
            rows.data.widen(rows.at(row, inner), size, wide);
            vf scale = inverse_rms(wide, size, eps);
            for (int64_t i = 0; i < size; i += LANES) {
                vf y = load(wide + i) * scale;
                if (weight != nullptr) {
                    vf w = factor.some(i, size - i);
                    if (zero_centred)
                        y = y * (w + splat(1.0f));
                    else
                        y = (x_is_bf16 ? round_to_bf16(y) : y) * w;
                }
                store_elements(out, x_is_bf16, row * size + i, y, size - i);
            }
        }
    }
}

// x, gate: [outer, inner, size]; weight: [size] or null; out: contiguous, of the gate's type. The norm is over each `group` of the entries,
// before the gate or after it.
extern "C" void hs_gated_rms_norm(const void *x, int32_t x_is_bf16, int64_t x_outer, int64_t x_inner, const void *gate, int32_t gate_is_bf16,
                                  int64_t gate_outer, int64_t gate_inner, const void *weight, int32_t weight_is_bf16, float eps, int64_t group,
                                  int32_t norm_first, int32_t activation, void *out, int64_t outer, int64_t inner, int64_t size, int32_t threads) {
    Rows rows{{x, x_is_bf16 != 0}, x_outer, x_inner}, gates{{gate, gate_is_bf16 != 0}, gate_outer, gate_inner};
    elements factor{weight, weight_is_bf16 != 0};
#pragma omp parallel num_threads(threads) if (threads > 1 && outer * inner * size > 32768)
    {
        FlushDenormals flush;
        static thread_local Scratch scratch;
        float *wide = scratch.floats(2 * (group + LANES)), *open = wide + round_up(group, LANES);
#pragma omp for schedule(static)
        for (int64_t item = 0; item < outer * inner * (size / group); item++) {
            int64_t row = item / (size / group), first = item % (size / group) * group;
            rows.data.widen(rows.at(row, inner) + first, group, wide);
            gates.data.widen(gates.at(row, inner) + first, group, open);
            for (int64_t i = 0; i < group; i += LANES) {
                store(open + i, activate(activation, load(open + i)));
                // The lanes past the end stay zero, whatever the activation of zero is.
                if (!norm_first)
                    store(wide + i, load(wide + i) * load(open + i));
            }
            vf scale = inverse_rms(wide, group, eps);
            for (int64_t i = 0; i < group; i += LANES) {
                vf y = load(wide + i) * scale;
                if (weight != nullptr)
                    y = y * factor.some(first + i, group - i);
                if (norm_first)
                    y = y * load(open + i);
                store_elements(out, gate_is_bf16, row * size + first + i, y, group - i);
            }
        }
    }
}
