// Causal depthwise convolution continued from a window of raw inputs. Called through ctypes by conv.py.
//
// Channels do not touch each other, so work is split over blocks of channels; each takes all sequences in turn. A row's result has the
// same bits however its sequence is cut into passes.
#include "slots.h"

using namespace hybridserve;

namespace {

constexpr int64_t MAX_CHANNELS = 256;
// Rows of the batch that are widened together.
constexpr int64_t CHUNK = 16;

struct Convolution {
    elements x;
    int64_t x_stride;
    elements weight, bias; // [C, width]; [C] or without data
    char *window;          // [slots, width - 1, C]
    bool window_is_bf16;
    int64_t slot_nbytes;
    void *out;
    bool out_is_bf16;
    int64_t channels, width;
    bool silu;
    int threads;
};

// A block of channels in one thread: its taps, and its inputs with the width - 1 rows before them, all fp32.
struct Block {
    int64_t first, count, padded;
    float *taps;   // [width, padded]
    float *bias;   // [padded]
    float *inputs; // [width - 1 + CHUNK, padded]
};

void load_taps(const Convolution &c, Block &b, float *by_channel) {
    c.weight.widen(b.first * c.width, b.count * c.width, by_channel);
    for (int64_t i = 0; i < b.count; i++)
        for (int64_t tap = 0; tap < c.width; tap++)
            b.taps[tap * b.padded + i] = by_channel[i * c.width + tap];
    if (c.bias.data != nullptr)
        c.bias.widen(b.first, b.count, b.bias);
    else
        memset(b.bias, 0, b.padded * 4);
}

void store_elements(void *data, bool is_bf16, int64_t at, vf v, int64_t count) {
    if (is_bf16)
        store_some(static_cast<bf16 *>(data) + at, v, count);
    else
        store_some(static_cast<float *>(data) + at, v, count);
}

void convolve_row(const Convolution &c, const Block &b, int64_t row, int64_t t) {
    const float *inputs = b.inputs + t * b.padded;
    for (int64_t i = 0; i < b.count; i += LANES) {
        vf y = load(b.bias + i);
        for (int64_t tap = 0; tap < c.width; tap++)
            y = fma(load(b.taps + tap * b.padded + i), load(inputs + tap * b.padded + i), y);
        if (c.silu)
            y = y * sigmoid_lanes(y);
        store_elements(c.out, c.out_is_bf16, row * c.channels + b.first + i, y, b.count - i);
    }
}

void run_sequence(const Convolution &c, const Slots &slots, const Sequence &sequence, const Block &b) {
    int64_t before = c.width - 1;
    if (sequence.start == nullptr)
        memset(b.inputs, 0, before * b.padded * 4);
    else
        for (int64_t i = 0; i < before; i++)
            elements{sequence.start, c.window_is_bf16}.widen(i * c.channels + b.first, b.count, b.inputs + i * b.padded);
    int64_t write = sequence.first_write;
    for (int64_t row = sequence.row; row < sequence.end; row += CHUNK) {
        int64_t count = smaller(CHUNK, sequence.end - row);
        for (int64_t t = 0; t < count; t++)
            c.x.widen((row + t) * c.x_stride + b.first, b.count, b.inputs + (before + t) * b.padded);
        for (int64_t t = 0; t < count; t++)
            convolve_row(c, b, row + t, t);
        for (; write < sequence.end_write && slots.write_row(write) < row + count; write++) {
            const float *kept = b.inputs + (slots.write_row(write) - row + 1) * b.padded;
            for (int64_t j = 0; j < before; j++)
                for (int64_t i = 0; i < b.count; i += LANES)
                    store_elements(slots.target(write), c.window_is_bf16, j * c.channels + b.first + i, load(kept + j * b.padded + i), b.count - i);
        }
        memmove(b.inputs, b.inputs + count * b.padded, before * b.padded * 4);
    }
}

void run(const Convolution &c, const StateTable &table) {
    int64_t window_nbytes = (c.width - 1) * c.channels * (c.window_is_bf16 ? 2 : 4);
    Slots slots(table, c.window, c.slot_nbytes, window_nbytes);
    int64_t size = MAX_CHANNELS;
    while (size > 2 * LANES && (c.channels + size - 1) / size < 2 * c.threads)
        size /= 2;
    int64_t blocks = (c.channels + size - 1) / size;
    int64_t work = slots.sequences.back().end * c.channels * c.width;
#pragma omp parallel num_threads(c.threads) if (c.threads > 1 && work > 16384)
    {
        static thread_local Scratch scratch;
        Block b;
        b.padded = size;
        b.taps = scratch.floats((3 * c.width + CHUNK + 1) * size);
        b.bias = b.taps + c.width * size;
        b.inputs = b.bias + size;
        float *by_channel = b.inputs + (c.width - 1 + CHUNK) * size;
#pragma omp for schedule(dynamic)
        for (int64_t block = 0; block < blocks; block++) {
            b.first = block * size;
            b.count = smaller(size, c.channels - b.first);
            load_taps(c, b, by_channel);
            for (const Sequence &sequence : slots.sequences)
                run_sequence(c, slots, sequence, b);
        }
    }
}

} // namespace

// x: [T, C] with row stride; weight: [C, width]; bias: [C] or null; window: [slots, width - 1, C], slots `slot_stride` entries apart;
// out: [T, C] contiguous, of x's type.
extern "C" void hs_short_conv(const void *x, int32_t x_is_bf16, int64_t x_stride, const void *weight, int32_t weight_is_bf16, const void *bias,
                              int32_t bias_is_bf16, void *window, int32_t window_is_bf16, int64_t slot_stride, void *out,
                              const int32_t *cu_seqlens, const int64_t *start_slots, const int64_t *write_rows, const int64_t *write_slots,
                              int64_t num_sequences, int64_t num_writes, int64_t channels, int64_t width, int32_t silu, int32_t threads) {
    Convolution c{{x, x_is_bf16 != 0},
                  x_stride,
                  {weight, weight_is_bf16 != 0},
                  {bias, bias_is_bf16 != 0},
                  static_cast<char *>(window),
                  window_is_bf16 != 0,
                  slot_stride * (window_is_bf16 ? 2 : 4),
                  out,
                  x_is_bf16 != 0,
                  channels,
                  width,
                  silu != 0,
                  threads};
    if (num_sequences > 0)
        run(c, {cu_seqlens, start_slots, write_rows, write_slots, num_sequences, num_writes});
}
