// The activation functions that operations are given by number; library.py has their names.
#pragma once

#include "numeric.h"

namespace hybridserve {

enum Activation { IDENTITY, SILU, SIGMOID, GELU, GELU_TANH, RELU2, QUICK_GELU };

static inline vf tanh_lanes(vf x) { return splat(1.0f) - splat(2.0f) / (exp_lanes(x * splat(2.0f)) + splat(1.0f)); }

static inline vf activate(int activation, vf x) {
    switch (activation) {
    case SILU: return x * sigmoid_lanes(x);
    case SIGMOID: return sigmoid_lanes(x);
    case GELU: {
        vf y;
        for (int lane = 0; lane < LANES; lane++)
            y[lane] = 0.5f * x[lane] * (1.0f + erff(x[lane] * 0.70710678f));
        return y;
    }
    case GELU_TANH: return splat(0.5f) * x * (splat(1.0f) + tanh_lanes(splat(0.79788456f) * fma(x * x * x, splat(0.044715f), x)));
    case RELU2: {
        vf positive = choose(x < vf{}, vf{}, x);
        return positive * positive;
    }
    case QUICK_GELU: return x * sigmoid_lanes(splat(1.702f) * x);
    default: return x;
    }
}

} // namespace hybridserve
