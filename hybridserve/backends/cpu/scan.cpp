// Mamba's selective scan, row after row. Called through ctypes by scan.py.
//
// A state is [C, N]. Channels do not touch each other: they lie across the lanes and state elements follow one another, so no sum crosses
// lanes and each channel goes through the same arithmetic whatever the block, the chunk or the call. Results have the same bits
// however a sequence is cut into passes.
#include "slots.h"

using namespace hybridserve;

namespace {

// Rows of the batch, and channels, that are worked on together.
constexpr int64_t CHUNK = 16;
constexpr int64_t BLOCK = 64;
// State elements whose exponentials are computed abreast.
constexpr int ABREAST = 4;

struct Rows {
    elements data;
    int64_t stride;
};

struct Scan {
    Rows x, dt, b, c;
    const float *A; // [C, N]
    char *pool;
    int64_t slot_nbytes;
    float *out; // [T, C]
    int64_t channels, size;
    int threads;
};

// What one thread needs for one block of channels: states and A with channels last, and some rows of b and c.
struct Workspace {
    float *state, *A, *b, *c;

    Workspace(Scratch &scratch, int64_t size) {
        state = scratch.floats(2 * size * BLOCK + 2 * CHUNK * round_up(size, LANES));
        A = state + size * BLOCK;
        b = A + size * BLOCK;
        c = b + CHUNK * round_up(size, LANES);
    }
};

// [count, size] to [size, BLOCK] and back. Channels beyond `count` are zeros.
void channels_last(const float *from, int64_t count, int64_t size, float *to) {
    memset(to, 0, size * BLOCK * 4);
    for (int64_t channel = 0; channel < count; channel++)
        for (int64_t n = 0; n < size; n++)
            to[n * BLOCK + channel] = from[channel * size + n];
}
void channels_first(const float *from, int64_t count, int64_t size, float *to) {
    for (int64_t channel = 0; channel < count; channel++)
        for (int64_t n = 0; n < size; n++)
            to[channel * size + n] = from[n * BLOCK + channel];
}

// State elements n to n + N of one vector of channels through one row: h <- h exp(dt A) + u b; y += h c.
template <int N> static inline vf advance(const float *A, float *state, int64_t n, vf dt, vf u, const float *b, const float *c, vf y) {
    vf decay[N];
    for (int i = 0; i < N; i++)
        decay[i] = dt * load(A + (n + i) * BLOCK);
    exp_lanes<N>(decay);
    for (int i = 0; i < N; i++) {
        vf h = fma(load(state + (n + i) * BLOCK), decay[i], u * splat(b[n + i]));
        store(state + (n + i) * BLOCK, h);
        y = fma(h, splat(c[n + i]), y);
    }
    return y;
}

// Some rows of a block of channels. Rows of b and c are widened already.
void run_rows(const Scan &s, int64_t row, int64_t rows, int64_t first, int64_t count, const Workspace &w) {
    int64_t padded = round_up(s.size, LANES);
    for (int64_t at = 0; at < count; at += LANES) {
        int64_t lanes = count - at;
        float *state = w.state + at;
        const float *A = w.A + at;
        for (int64_t t = 0; t < rows; t++) {
            vf dt = s.dt.data.some((row + t) * s.dt.stride + first + at, lanes);
            vf u = dt * s.x.data.some((row + t) * s.x.stride + first + at, lanes), y = {};
            const float *b = w.b + t * padded, *c = w.c + t * padded;
            int64_t n = 0;
            for (; n + ABREAST <= s.size; n += ABREAST)
                y = advance<ABREAST>(A, state, n, dt, u, b, c, y);
            for (; n < s.size; n++)
                y = advance<1>(A, state, n, dt, u, b, c, y);
            store_some(s.out + (row + t) * s.channels + first + at, y, lanes);
        }
    }
}

// One sequence and block of channels, through all of the sequence's rows.
void run_block(const Scan &s, const Slots &slots, const Sequence &sequence, int64_t first, const Workspace &w) {
    int64_t count = smaller(BLOCK, s.channels - first), padded = round_up(s.size, LANES);
    channels_last(s.A + first * s.size, count, s.size, w.A);
    if (sequence.start != nullptr)
        channels_last(reinterpret_cast<const float *>(sequence.start) + first * s.size, count, s.size, w.state);
    else
        memset(w.state, 0, s.size * BLOCK * 4);
    int64_t write = sequence.first_write;
    for (int64_t row = sequence.row; row < sequence.end;) {
        int64_t end = smaller(row + CHUNK, sequence.end);
        if (write < sequence.end_write)
            end = smaller(end, slots.write_row(write) + 1);
        for (int64_t t = 0; t < end - row; t++) {
            s.b.data.widen((row + t) * s.b.stride, s.size, w.b + t * padded);
            s.c.data.widen((row + t) * s.c.stride, s.size, w.c + t * padded);
        }
        run_rows(s, row, end - row, first, count, w);
        for (; write < sequence.end_write && slots.write_row(write) == end - 1; write++)
            channels_first(w.state, count, s.size, reinterpret_cast<float *>(slots.target(write)) + first * s.size);
        row = end;
    }
}

} // namespace

// x, dt: [T, C]; b, c: [T, N], each with a stride of rows and dense in the last dimension. A: fp32 [C, N]; pool: fp32 [slots, C, N],
// slots `slot_stride` floats apart; out: fp32 [T, C], contiguous.
extern "C" void hs_selective_scan(const void *x, int32_t x_is_bf16, int64_t x_row, const void *dt, int32_t dt_is_bf16, int64_t dt_row,
                                  const void *b, int32_t b_is_bf16, int64_t b_row, const void *c, int32_t c_is_bf16, int64_t c_row,
                                  const float *A, float *pool, int64_t slot_stride, float *out, const int32_t *cu_seqlens,
                                  const int64_t *start_slots, const int64_t *write_rows, const int64_t *write_slots, int64_t num_sequences,
                                  int64_t num_writes, int64_t channels, int64_t size, int32_t threads) {
    Scan s{{{x, x_is_bf16 != 0}, x_row},
           {{dt, dt_is_bf16 != 0}, dt_row},
           {{b, b_is_bf16 != 0}, b_row},
           {{c, c_is_bf16 != 0}, c_row},
           A,
           reinterpret_cast<char *>(pool),
           slot_stride * 4,
           out,
           channels,
           size,
           threads};
    StateTable table{cu_seqlens, start_slots, write_rows, write_slots, num_sequences, num_writes};
    Slots slots(table, s.pool, s.slot_nbytes, channels * size * 4);
    int64_t blocks = (channels + BLOCK - 1) / BLOCK;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        FlushDenormals flush;
        static thread_local Scratch scratch;
        Workspace w(scratch, size);
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < num_sequences * blocks; item++)
            run_block(s, slots, slots.sequences[item / blocks], item % blocks * BLOCK, w);
    }
}
