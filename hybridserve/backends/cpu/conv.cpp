// Causal depthwise convolution continued from a window of raw inputs. Called through ctypes by conv.py.
//
// Work is split over chunks of rows and blocks of channels, neither of which touch each other. A row's result has the same bits however
// its sequence is cut into passes.
#include "slots.h"

using namespace hybridserve;

namespace {

constexpr int64_t MAX_CHANNELS = 256;
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

// Some channels: taps [width, padded] and bias [padded], fp32.
struct Channels {
    int64_t first, count, padded;
    float *taps, *bias;
};

// Some rows of one sequence.
struct Chunk {
    const Sequence *sequence;
    int64_t row, end;
};

void load_taps(const Convolution &c, const Channels &b, float *by_channel) {
    c.weight.widen(b.first * c.width, b.count * c.width, by_channel);
    for (int64_t i = 0; i < b.count; i++)
        for (int64_t tap = 0; tap < c.width; tap++)
            b.taps[tap * b.padded + i] = by_channel[i * c.width + tap];
    if (c.bias.data != nullptr)
        c.bias.widen(b.first, b.count, b.bias);
    else
        memset(b.bias, 0, b.padded * 4);
}

// The input `row` of a sequence, which may lie before this pass.
void load_input(const Convolution &c, const Sequence &sequence, int64_t row, const Channels &b, float *to) {
    if (row >= sequence.row)
        c.x.widen(row * c.x_stride + b.first, b.count, to);
    else if (sequence.start != nullptr)
        elements{sequence.start, c.window_is_bf16}.widen((c.width - 1 + row - sequence.row) * c.channels + b.first, b.count, to);
    else
        memset(to, 0, b.padded * 4);
}

// N vectors of channels from i on. Past the last channel, taps and inputs have room and nothing is stored.
template <int N> void convolve(const Convolution &c, const Channels &b, const float *inputs, int64_t row, int64_t i) {
    vf y[N], gate[N];
    for (int n = 0; n < N; n++)
        y[n] = load(b.bias + i + n * LANES);
    for (int64_t tap = 0; tap < c.width; tap++)
        for (int n = 0; n < N; n++)
            y[n] = fma(load(b.taps + tap * b.padded + i + n * LANES), load(inputs + tap * b.padded + i + n * LANES), y[n]);
    if (c.silu) {
        memcpy(gate, y, sizeof gate);
        sigmoid_lanes<N>(gate);
        for (int n = 0; n < N; n++)
            y[n] = y[n] * gate[n];
    }
    for (int n = 0; n < N && i + n * LANES < b.count; n++)
        store_elements(c.out, c.out_is_bf16, row * c.channels + b.first + i + n * LANES, y[n], b.count - i - n * LANES);
}

void convolve_row(const Convolution &c, const Channels &b, const float *inputs, int64_t row) {
    constexpr int ABREAST = 4;
    int64_t i = 0;
    for (; i + ABREAST * LANES <= b.padded && i < b.count; i += ABREAST * LANES)
        convolve<ABREAST>(c, b, inputs, row, i);
    for (; i < b.count; i += LANES)
        convolve<1>(c, b, inputs, row, i);
}

// inputs: scratch of [width - 1 + CHUNK, padded] fp32, the chunk's rows with those before them.
void run_chunk(const Convolution &c, const Slots &slots, const Chunk &chunk, const Channels &b, float *inputs) {
    int64_t before = c.width - 1;
    for (int64_t row = chunk.row - before; row < chunk.end; row++)
        load_input(c, *chunk.sequence, row, b, inputs + (row - chunk.row + before) * b.padded);
    for (int64_t row = chunk.row; row < chunk.end; row++)
        convolve_row(c, b, inputs + (row - chunk.row) * b.padded, row);
    for (int64_t write = chunk.sequence->first_write; write < chunk.sequence->end_write; write++) {
        int64_t row = slots.write_row(write);
        if (row < chunk.row || row >= chunk.end)
            continue;
        const float *kept = inputs + (row - chunk.row + 1) * b.padded;
        for (int64_t j = 0; j < before; j++)
            for (int64_t i = 0; i < b.count; i += LANES)
                store_elements(slots.target(write), c.window_is_bf16, j * c.channels + b.first + i, load(kept + j * b.padded + i), b.count - i);
    }
}

void run(const Convolution &c, const StateTable &table) {
    int64_t window_nbytes = (c.width - 1) * c.channels * (c.window_is_bf16 ? 2 : 4);
    Slots slots(table, c.window, c.slot_nbytes, window_nbytes, CHUNK);
    std::vector<Chunk> chunks;
    for (const Sequence &sequence : slots.sequences)
        for (int64_t row = sequence.row; row < sequence.end; row += CHUNK)
            chunks.push_back({&sequence, row, smaller(row + CHUNK, sequence.end)});
    int64_t num_chunks = int64_t(chunks.size()), size = MAX_CHANNELS;
    while (size > 2 * LANES && num_chunks * ((c.channels + size - 1) / size) < 4 * c.threads)
        size /= 2;
    int64_t blocks = (c.channels + size - 1) / size, block_floats = (c.width + 1) * size;
    static thread_local Scratch shared;
    float *taps = shared.floats(blocks * block_floats);
    auto block_at = [&](int64_t block) {
        float *memory = taps + block * block_floats;
        return Channels{block * size, smaller(size, c.channels - block * size), size, memory, memory + c.width * size};
    };
    bool many = slots.sequences.back().end * c.channels * c.width > 16384;
#pragma omp parallel num_threads(c.threads) if (c.threads > 1 && many)
    {
        FlushDenormals flush;
        static thread_local Scratch scratch;
        float *memory = scratch.floats((c.width + CHUNK) * size);
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks; block++)
            load_taps(c, block_at(block), memory);
        // The blocks of a chunk one after the other: its rows are then on pages that were just in use.
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < num_chunks * blocks; item++)
            run_chunk(c, slots, chunks[item / blocks], block_at(item % blocks), memory);
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
